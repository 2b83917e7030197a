"""`python -m benchmarks`: every benchmark, then the tables and the plot drawn from their rows.

`--quick`: those that have a quick form, nothing recorded.
"""

from __future__ import annotations

import argparse
from importlib import import_module


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="benchmarks", description="every benchmark")
    parser.add_argument("--quick", action="store_true", help="the quick forms, nothing recorded")
    quick = parser.parse_args(argv).quick
    every = ["--parts", "--agreement", "4"]
    import_module("benchmarks.attention").main([*every, *(["--quick"] if quick else [])])


if __name__ == "__main__":
    main()
