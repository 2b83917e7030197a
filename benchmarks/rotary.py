"""Time of rotating the queries and keys of a call, against rotary-embedding-torch.

    python -m benchmarks.rotary               time all, append rows
    python -m benchmarks.rotary --table       redraw the table of docs/kernels.md from the rows
    python -m benchmarks.rotary --quick       one short row of tokens, nothing recorded

Queries [b h n d] and keys as a projection gives them, token after token, in bf16; of one new token
a row, as in decoding, forward only. The published package forms angles of float32 positions, as its
`rotate_queries_or_keys` does not for inputs in bf16, which cannot tell position 257 from 256, and
turns q and k by them: as it is (`rotary-embedding-torch`) and through torch.compile (`compiled`).
Each is timed after its outputs and gradients were found right, against float64.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
import torch._functorch.config
from rotary_embedding_torch import RotaryEmbedding, apply_rotary_emb
from torch import Tensor

from native_sparse_attention.rotary import Rotary, rotate, rotation

from . import common
from .common import Row
from .oracle import WrongResult
from .problem import nbytes

PAGE = common.ROOT / "docs" / "kernels.md"
NO_ROWS = "not measured yet: run `python -m benchmarks.rotary`"
HEADS, KV_HEADS, D = 64, 4, 128
SIZES = ((1, 8192), (1, 65536), (16, 1))
PEER = "rotary-embedding-torch"
# of the error of eager PyTorch in the same dtype; the peers form sines by other ways
FACTOR = 4.0

Pair = list[Tensor]


def callables(device: torch.device) -> dict[str, Callable[[Pair], Pair]]:
    """The published module first: ours is compared with it."""
    ours, peer = Rotary(D).to(device), RotaryEmbedding(D, cache_if_possible=False).to(device)

    def published(pair: Pair) -> Pair:
        T = pair[0].shape[2]
        angles = peer(torch.arange(T, device=device, dtype=torch.float32), seq_len=T)
        return [apply_rotary_emb(angles, t) for t in pair]

    known = {PEER: published, "ours": lambda pair: rotate(ours, pair, 0, None, "auto")}
    if device.type == "cuda":  # else it needs a compiler of C++
        known["compiled"] = torch.compile(published, dynamic=False)
    return known


def draw(B: int, T: int, device: torch.device) -> tuple[Pair, Pair]:
    """Queries and keys, and the gradients of their rotated."""
    generator = torch.Generator(device).manual_seed(0)

    def normal(heads: int) -> Tensor:
        x = torch.randn(B, T, heads, D, generator=generator, device=device, dtype=torch.bfloat16)
        return x.transpose(1, 2)

    heads = (HEADS, KV_HEADS)
    return [normal(h).requires_grad_() for h in heads], [normal(h) for h in heads]


def check(call: Callable[[Pair], Pair], pair: Pair, d_out: Pair) -> float:
    """The largest error as a share of its budget, of the first 128 tokens and of the last.

    Raises:
        WrongResult: an error above `FACTOR` times that of eager PyTorch in the same dtype and one
            unit in the last place.
    """
    some = torch.cat([torch.arange(pair[0].shape[2]).split(128)[i] for i in (0, -1)])
    some = some.to(pair[0].device).unique()

    def results(turn: Callable[[Pair], Pair], dtype: torch.dtype) -> Pair:
        leaves = [t.detach().to(dtype).requires_grad_() for t in pair]
        outs = turn(leaves)
        grads = torch.autograd.grad(outs, leaves, [t.to(dtype) for t in d_out])
        return [t.detach()[:, :, some] for t in (*outs, *grads)]

    def plain(leaves: Pair) -> Pair:
        turn = rotation(Rotary(D).to(some.device), leaves[0], 0)
        return [turn(t) for t in leaves]

    dtype, worst = pair[0].dtype, 0.0
    exact = results(plain, torch.float64)
    for got, right, low in zip(results(call, dtype), exact, results(plain, dtype), strict=True):
        error, lowp = ((t.double() - right).abs().max().item() for t in (got, low))
        budget = FACTOR * lowp + torch.finfo(dtype).eps * right.abs().max().item()
        if not error <= budget:
            raise WrongResult(f"errs by {error:.2e}, above {budget:.2e}")
        worst = max(worst, error / budget)
    return worst


def passes(call: Callable[[Pair], Pair], pair: Pair, d_out: Pair) -> dict[str, Callable[[], Pair]]:
    """What is timed, by its name."""
    outs = call(pair)

    def backward() -> Pair:
        return list(torch.autograd.grad(outs, pair, d_out, retain_graph=True))

    forward = {"forward": lambda: call(pair)}
    return forward if pair[0].shape[2] == 1 else {**forward, "backward": backward}


def run(
    sizes: list[tuple[int, int]], seconds: float, out: Path | None, device: torch.device
) -> list[Row]:
    known, rows = common.environment(device), []
    for B, T in sizes:
        pair, d_out = draw(B, T, device)
        peer: dict[str, float] = {}
        for name, call in callables(device).items():
            worst = check(call, pair, d_out)
            for which, timed in passes(call, pair, d_out).items():
                row: Row = {"provider": name, "B": B, "T": T, "H": HEADS, "K": KV_HEADS, "D": D}
                row |= {"dtype": str(pair[0].dtype).removeprefix("torch."), "pass": which}
                row |= common.time_call(timed, seconds, device)
                if name == PEER:
                    peer[which] = row["p50_ms"]
                moved = 2 * nbytes(*pair)
                row |= {"gbps": round(moved / row["p50_ms"] * 1e-6, 1)}
                row |= {"over_published": round(peer[which] / row["p50_ms"], 3)}
                row |= {"error_share": round(worst, 3), **known}
                print(f"{name:24} B={B:<3} T={T:<6} {which:8} {row['p50_ms']:9.4f} ms", flush=True)
                common.append_row(out, row)
                rows.append(row)
        common.release()
    return rows


def table(rows: list[Row]) -> str:
    """Milliseconds, how many times as fast as the published module, and GB/s; the latest rows."""
    latest = {(row["B"], row["T"], row["provider"], row["pass"]): row for row in rows}
    if not latest:
        return NO_ROWS
    sizes = list(dict.fromkeys((B, T, which) for B, T, _, which in latest))
    heads = (f"B={B}, T={T // 1024}k" if T % 1024 == 0 else f"B={B}, T={T}" for B, T, _ in sizes)
    titles = [f"{head}, {which}" for head, (_, _, which) in zip(heads, sizes, strict=True)]
    lines = [["ms (times as fast); GB/s", *titles]]
    for name in dict.fromkeys(name for _, _, name, _ in latest):
        cells = []
        for B, T, which in sizes:
            row = latest.get((B, T, name, which))
            times = "" if name == PEER or row is None else f" ({row['over_published']:.3g})"
            cells.append("" if row is None else f"{row['p50_ms']:.3g}{times}; {row['gbps']:.0f}")
        lines.append([name, *cells])
    last = rows[-1]
    where = f"{last['gpu']}, torch {last['torch']}, triton {last['triton']}"
    return f"{common.markdown(lines)}\n\n{where}, commit {last['commit'][:7]}."


def render(page: str, rows: list[Row]) -> str:
    """The page with its table drawn anew."""
    return common.redraw(page, "rotary", table(rows))


def main(argv: list[str] | None = None) -> list[Row]:
    # a backward pass that is timed runs again and again
    torch._functorch.config.donated_buffer = False
    return common.command("rotary", argv, PAGE, render, run, SIZES, [(1, 300)])


if __name__ == "__main__":
    main()
