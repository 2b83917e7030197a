"""`python -m benchmarks`: the benchmarks of one GPU that need neither weights nor another checkout.

    python -m benchmarks            run them, append rows, redraw the pages
    python -m benchmarks --quick    their quick forms, nothing recorded
    python -m benchmarks --table    redraw every page and plot from the rows

`learning` and `recall` train many models for hours of GPUs, `pretrained` and `distillation` need
the weights of a model, `against` another checkout: they are started by hand, and drawn here.
"""

from __future__ import annotations

import argparse

from . import (
    attention,
    decode,
    distillation,
    generation,
    layer,
    learning,
    masks,
    memory,
    model,
    pretrained,
    recall,
)
from .common import Benchmark

CALLS: list[tuple[Benchmark, list[str]]] = [
    (attention.BENCHMARK, ["--parts", "--agreement", "4"]),
    (masks.BENCHMARK, []),
    (memory.BENCHMARK, []),
    (decode.BENCHMARK, []),
    (layer.BENCHMARK, []),
    (model.BENCHMARK, []),
    (generation.BENCHMARK, []),
    (generation.BENCHMARK, ["--model", "llama-8b", "--layers", "8"]),
]
BY_HAND = tuple(module.BENCHMARK for module in (distillation, learning, pretrained, recall))


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="benchmarks", description="every benchmark")
    parser.add_argument("--quick", action="store_true", help="the quick forms, nothing recorded")
    parser.add_argument("--table", action="store_true", help="redraw pages and plots, run nothing")
    args = parser.parse_args(argv)
    if args.quick:
        for benchmark, options in [*CALLS[:7], *((call, []) for call in BY_HAND[:2])]:
            benchmark.main([*options, "--quick"])
        return
    try:
        for benchmark, options in CALLS if not args.table else []:
            benchmark.main(options)
    finally:
        for benchmark in {call.name: call for call in (*(c for c, _ in CALLS), *BY_HAND)}.values():
            benchmark.main(["--table"])


if __name__ == "__main__":
    main()
