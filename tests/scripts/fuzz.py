"""Draws calls of the kernels beyond every tile, and holds each to the specification:

    python tests/scripts/fuzz.py --seconds 300    as many as fit; errors and refusals
    python tests/scripts/fuzz.py --call 17        call 17 of seed 0 again, with its traceback

Heads, widths, blocks and lengths are drawn around the sizes of tiles. A call is wrong if it errs
for three draws of its values, since of thousands of calls some exceed the budget by rounding alone.
A ValueError or a NotImplementedError is a refusal.
"""

import argparse
import functools
import random
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.helpers import budget, calls, selections
from tests.kernels.decode import test_decode

CUDA = budget.CUDA
EDGES = (1, 2, 15, 16, 17, 31, 33, *((63, 64, 65, 127, 129, 255, 257, 1100) if CUDA else ()))
WIDTHS = (16, 24, 40, 64, 80, 96, 128, 192, 256) if CUDA else (8, 16, 24)
GROUPS = (1, 2, 3, 4, 7, 8, 9, 16, 17, 32, 33, 64) if CUDA else (1, 2, 5, 9)
KINDS = ("compressed", "selected", "window", "layer", "one softmax", "ranking", "step")
DTYPES = (torch.float16, torch.float32, *((torch.bfloat16,) if CUDA else ()))


def run_call(rng: random.Random) -> str:
    """Draw a call, and check it. What was called."""
    pick, kind = rng.choice, rng.choice(KINDS)
    K, width, d = pick((1, 2, 3)), pick(WIDTHS), pick((1, 2, 4, 6, 8, 16, 32))
    heads = (K * pick(GROUPS), K, width, pick((width, pick(WIDTHS))))
    s = pick([s for s in (d, 2 * d, 3 * d, 8, 16, 64, 128) if s % d == 0 and s <= 128])
    initial, local = (0, 0, 1, 3, 40), (0, 1, 1, 2, 5, 40)
    forced = dict(num_initial_blocks=pick(initial), num_local_blocks=pick(local))
    ranking: dict[str, Any] = forced | dict(
        compress_block_size=d * pick((1, 1, 2, 3)), compress_block_sliding_stride=d,
        selection_block_size=s, num_selected_blocks=pick((0, 1, 2, 3, 8, 13, 16, 17, 32, 33, 64)),
        selection_stride=pick([r for r in (1, 1, 2, 4, 16) if s % r == 0]),
        importance=pick(("logits", "max", "head_max", "probs")),
    )  # fmt: skip
    common: dict[str, Any] = dict(memory=pick((0, 1, 2, 70)), heads=heads)
    dtype, window = pick(DTYPES), dict(sliding_window_size=pick(EDGES))
    T = pick(EDGES)
    place = (T, T + pick((0, 0, s * pick((1, 7)))))  # of groups that begin with the queries
    if kind == "step":
        page = pick((None, s * d))
        N = pick((1, 3, 31, 32, 33, 64, 65)) * (page or s)
        T = min(N, pick((1, 1, 2, 5, 16)))
        lengths = [rng.randint(0, N - T) for _ in range(pick((1, 2, 5)))]
        settings = common | ranking | window | dict(T=T, N=N, lengths=lengths, page=page)
        if ranking["importance"] != "probs" and pick((True, False)):
            bits = pick((16, 8, 4 if s >= 16 * d else 8)) if "max" in ranking["importance"] else 16
            settings |= dict(branches=("selected",), memory=0, ranking_bits=bits)
        check, args = test_decode.assert_right, (torch.float32,)
    elif kind == "ranking":
        H, _, D, _ = heads
        causal, m = pick((True, True, False)), common["memory"]
        tensors = selections.draw(*place, H, K, D, d=d, causal=causal, m=m, dtype=dtype)
        settings = ranking | dict(causal=causal, query_heads_share_selected_kv=pick((True, False)))
        check, args = selections.assert_right, (*tensors, place[1])
    else:
        sizes = ranking | window if kind == "layer" else ranking
        if kind == "selected":
            sizes = forced | dict(selection_block_size=s, n=max(1, ranking["num_selected_blocks"]))
        elif kind in ("window", "compressed"):
            sizes = window if kind == "window" else dict(compress_block_sliding_stride=d)
        common |= dict(place=place, causal=pick((True, True, False)), size=pick((1.0, 8.0)))
        # of two rows of a half precision, the rounded output may weigh more than eager's error
        common |= dict(soft_cap=pick((None, 2.0)), sinks=pick((False, True)), batch=2 + 64 // T)
        documents = pick(([], [], [pick(EDGES), 0, pick(EDGES)]))
        settings = common | sizes | dict(lengths=documents or None)
        call, specification = calls.draw(kind, dtype, **settings), None
        if kind in calls.LAYERS:  # near-ties may fall either way
            with torch.no_grad():
                _, block_indices = call("triton", return_block_indices=True)
            specification = calls.under_selection(call, block_indices)
        op = functools.partial(call.op, **call.settings)
        args = op, call.tensors, dtype, "triton", specification
        check = lambda *args, **_: budget.assert_right(*args)  # noqa: E731
    what = f"{kind} {dtype} {settings}"
    try:
        check(*args, **settings)
    except Exception as error:
        raise type(error)(f"{error} <- {what}") from error
    return what


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--call", type=int)
    args = parser.parse_args()
    end, number, counts = time.monotonic() + args.seconds, args.call or 0, Counter()
    while time.monotonic() < end:
        for values in range(3):
            torch.manual_seed(3 * number + values)
            try:
                what = run_call(random.Random(f"{args.seed}.{number}"))
            except (ValueError, NotImplementedError) as error:
                what = f"refused: {str(error)[:60]}"
            except Exception as error:
                if values < 2 and isinstance(error, AssertionError):
                    continue
                if args.call is not None:
                    raise
                what = "wrong"
                print(f"call {number}: {type(error).__name__} {str(error)[:600]}", flush=True)
            break
        if args.call is not None:
            print(what)
            return 0
        counts[what.partition(" torch")[0]] += 1
        number += 1
    print("\n".join(f"{count:6d} {what}" for what, count in counts.most_common()))
    return int(counts["wrong"] > 0)


if __name__ == "__main__":
    sys.exit(main())
