"""`python -m benchmarks`: the benchmarks of one GPU that need neither weights nor another checkout.

    python -m benchmarks            run them, append rows, redraw the pages
    python -m benchmarks --quick    their quick forms, nothing recorded
    python -m benchmarks --table    redraw every page and plot from the rows

`learning` and `recall` train many models for hours of GPUs, `pretrained` and `distillation` need
the weights of a model, `against` another checkout: they are started by hand, and drawn here.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from . import (
    attention,
    decode,
    distillation,
    generation,
    layer,
    learning,
    masks,
    memory,
    pretrained,
    recall,
    training,
)

EVERY = ["--parts", "--agreement", "4"]
CALLS: list[tuple[Callable[[list[str]], Any], list[str]]] = [
    (attention.main, EVERY),
    (training.main, []),
    (masks.main, []),
    (memory.main, []),
    (decode.main, []),
    (layer.main, []),
    (generation.main, []),
    (generation.main, ["--model", "llama-8b", "--layers", "8"]),
]
BY_HAND = (distillation.main, learning.main, pretrained.main, recall.main)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="benchmarks", description="every benchmark")
    parser.add_argument("--quick", action="store_true", help="the quick forms, nothing recorded")
    parser.add_argument("--table", action="store_true", help="redraw pages and plots, run nothing")
    args = parser.parse_args(argv)
    every = [*dict.fromkeys(call for call, _ in CALLS), *BY_HAND]
    if args.quick:
        for call, options in [*CALLS[:7], *((call, []) for call in BY_HAND[:2])]:
            call([*options, "--quick"])
        return
    try:
        for call, options in CALLS if not args.table else []:
            call(options)
    finally:
        for call in every:
            call(["--table"])


if __name__ == "__main__":
    main()
