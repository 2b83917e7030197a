"""`python -m benchmarks`: every benchmark, then the page that is drawn from the rows.

`--quick`: those with a quick form, in it, and nothing recorded. (enwik8 trains; it has none.)
Training of many models, `learning` and `recall`, is started by hand: it takes hours of GPUs. So are
`pretrained` and `distillation`, which need the weights of a model, and `against`, which needs
another checkout.
"""

from __future__ import annotations

import argparse

from . import (
    attention,
    decode,
    distillation,
    enwik8,
    generation,
    host,
    learning,
    masks,
    memory,
    recall,
    report,
    rotary,
    training,
    windows,
)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="benchmarks", description="every benchmark")
    parser.add_argument("--quick", action="store_true", help="the quick forms, nothing recorded")
    quick = parser.parse_args(argv).quick
    every = ["--parts", "--agreement", "4"]
    if quick:
        attention.main([*every, "--quick"])
        training.main(["--quick", "--providers", "ours"])
        masks.main(["--quick"])
        memory.main(["--quick"])
        rotary.main(["--quick"])
        windows.main(["--quick"])
        decode.main(["--quick"])
        decode.main(["--quick", "--sampling"])
        host.main(["--quick"])
        generation.main(["--quick"])
        distillation.main(["--quick"])
        learning.main(["--quick"])
        recall.main(["--quick"])
        return
    try:
        attention.main(every)
    finally:
        report.main([])
    training.main([])
    training.main(["--table"])
    masks.main([])
    masks.main(["--table"])
    memory.main([])
    memory.main(["--table"])
    rotary.main([])
    rotary.main(["--table"])
    windows.main([])
    windows.main(["--table"])
    try:
        decode.main([])
        decode.main(["--sampling"])
    finally:
        decode.main(["--table"])
    host.main([])
    host.main(["--first-call"])
    generation.main([])
    generation.main(["--model", "llama-8b", "--layers", "8"])
    generation.main(["--table"])
    enwik8.main([])


if __name__ == "__main__":
    main()
