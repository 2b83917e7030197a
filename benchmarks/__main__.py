"""`python -m benchmarks`: the benchmarks of one GPU that need neither weights nor another checkout.

    python -m benchmarks            run them, append rows, redraw the pages
    python -m benchmarks --quick    their quick forms, nothing recorded
    python -m benchmarks --table    redraw every page and plot from the rows

`learning` and `recall` train many models for hours of GPUs, `pretrained` and `distillation` need
the weights of a model, `against` another checkout, `distributed` several GPUs: they are started by
hand, and drawn here.
"""

from __future__ import annotations

import argparse

from . import (
    attention,
    clock,
    decode,
    distillation,
    distributed,
    generation,
    learning,
    pretrained,
    recall,
)

DIRECT = (attention, decode, clock, generation)
BY_HAND = (distillation, distributed, learning, pretrained, recall)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="benchmarks", description="every benchmark")
    parser.add_argument("--quick", action="store_true", help="the quick forms, nothing recorded")
    parser.add_argument("--table", action="store_true", help="redraw pages and plots, run nothing")
    args = parser.parse_args(argv)
    if args.quick:
        for module in (*DIRECT, distillation, learning):
            module.main(["--quick"])
        return
    try:
        for module in DIRECT if not args.table else ():
            module.main([])
        if not args.table:
            generation.main(["--model", "llama-8b", "--layers", "8"])
    finally:
        for module in (*DIRECT, *BY_HAND):
            module.main(["--table"])


if __name__ == "__main__":
    main()
