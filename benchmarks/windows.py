"""Time and memory of forming compressed keys and values: without copies of windows, and with them.

    python -m benchmarks.windows              time all, append rows
    python -m benchmarks.windows --table      redraw the table of docs/kernels.md from the rows
    python -m benchmarks.windows --quick      short, nothing recorded

Keys and values [b h n d] as a projection gives them, positions added, in bf16; forward, its graph
recorded, and backward, with gradients for keys and values, positions and weights. "copied" adds
positions to each window, which copies it, as any network is called; "sliding" is what the layer
does with networks that need no copies. Memory is what the backward keeps, and what both passes take
at most, beside inputs, in units of keys and values. Each way is timed after its outputs and
gradients were found right, against float64.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from pathlib import Path

import torch
from torch import Tensor, nn

from native_sparse_attention import SparseAttention
from native_sparse_attention.compress import MeanPool, SingleProjection, slides, windows_of

from . import common
from .common import Row
from .oracle import WrongResult

PAGE = common.ROOT / "docs" / "kernels.md"
NO_ROWS = "not measured yet: run `python -m benchmarks.windows`"
# b, h, n, d, l and stride
Size = tuple[int, int, int, int, int, int]
SIZES: tuple[Size, ...] = (
    (1, 4, 8192, 128, 32, 16),
    (1, 4, 32768, 128, 32, 16),
    (4, 4, 8192, 64, 16, 8),
)
CHECK_LENGTH = 256
# of the error of copied windows in the same dtype
FACTOR = 2.0

NETWORKS: dict[str, Callable[[int, int, int], nn.Module | None]] = {
    "default MLP": lambda h, d, l: None,
    "SingleProjection": lambda h, d, l: SingleProjection(d, l),
    "SingleProjection, a map a head": lambda h, d, l: SingleProjection(d, l, h),
    "MeanPool": lambda h, d, l: MeanPool(),
}


def layer_of(name: str, h: int, d: int, l: int, stride: int) -> SparseAttention:
    torch.manual_seed(0)
    layer = SparseAttention(
        dim=d, dim_head=d, heads=h, kv_heads=h, sliding_window_size=l, compress_block_size=l,
        compress_block_sliding_stride=stride, selection_block_size=l, num_selected_blocks=1,
        causal=True, compress_mlp=NETWORKS[name](h, d, l),
    )  # fmt: skip
    for positions in (layer.k_intrablock_positions, layer.v_intrablock_positions):
        nn.init.normal_(positions)
    return layer


def draw(b: int, h: int, n: int, d: int, device: torch.device) -> list[Tensor]:
    """Keys, values, and the gradients of their summaries are drawn from this seed."""
    torch.manual_seed(1)
    kv = torch.randn(b, n, 2 * h, d, device=device, dtype=torch.bfloat16)
    return [t.requires_grad_() for t in kv.transpose(1, 2).split(h, dim=1)]


def summaries(layer: SparseAttention, kv: list[Tensor], way: str) -> list[Tensor]:
    raw = dict(zip("kv", kv, strict=True))
    if way == "sliding":
        found = layer.compress_whole(raw, None, layer.backend)
    else:
        l, d = layer.compress_block_size, layer.compress_block_sliding_stride
        found = layer.compress({name: windows_of(t, l, d, True) for name, t in raw.items()})
    return [found["ck"], found["cv"]]


def of(layer: SparseAttention, kv: list[Tensor]) -> list[Tensor]:
    """What gradients are formed for."""
    positions = [layer.k_intrablock_positions, layer.v_intrablock_positions]
    networks = (layer.k_compress, layer.v_compress)
    return [*kv, *positions, *(p for network in networks for p in network.parameters())]


def check(layer: SparseAttention, kv: list[Tensor], way: str) -> None:
    """Of the first tokens.

    Raises:
        WrongResult: an error (root mean square) above `FACTOR` times that of copied windows.
    """

    def results(layer: SparseAttention, way: str, dtype: torch.dtype) -> list[Tensor]:
        leaves = [t[:, :, :CHECK_LENGTH].detach().to(dtype).requires_grad_() for t in kv]
        outs = summaries(layer, leaves, way)
        generator = torch.Generator(kv[0].device).manual_seed(2)
        d_outs = [torch.randn(t.shape, generator=generator, device=t.device) for t in outs]
        d_outs = [t.to(outs[0].dtype) for t in d_outs]
        return [*outs, *torch.autograd.grad(outs, of(layer, leaves), d_outs)]

    dtype = kv[0].dtype
    exact = results(deepcopy(layer).double(), "copied", torch.float64)
    low, got = results(layer, "copied", dtype), results(layer, way, dtype)
    for right, copied, found in zip(exact, low, got, strict=True):
        error, budget = ((t.double() - right).square().mean().sqrt() for t in (found, copied))
        budget = FACTOR * budget + torch.finfo(dtype).eps * right.square().mean().sqrt() / 8
        if not error <= budget:
            raise WrongResult(f"{way} windows err by {error:.2e}, above {budget:.2e}")


def measure(layer: SparseAttention, kv: list[Tensor], way: str, seconds: float) -> Row:
    device, inputs = kv[0].device, of(layer, kv)
    row: Row = {}
    unit = sum(t.numel() * t.element_size() for t in kv)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
    outs = summaries(layer, kv, way)
    d_outs = [torch.randn_like(t) for t in outs]
    if device.type == "cuda":
        row["kept"] = round((torch.cuda.memory_allocated(device) - before) / unit, 3)
    torch.autograd.grad(outs, inputs, d_outs)
    if device.type == "cuda":
        row["peak"] = round((torch.cuda.max_memory_allocated(device) - before) / unit, 3)
    forward = common.time_call(lambda: summaries(layer, kv, way), seconds, device)
    outs = summaries(layer, kv, way)

    def backward() -> None:
        torch.autograd.grad(outs, inputs, d_outs, retain_graph=True)

    return row | {
        "forward_ms": forward["p50_ms"],
        "backward_ms": common.time_call(backward, seconds, device)["p50_ms"],
    }


def run(sizes: list[Size], seconds: float, out: Path | None, device: torch.device) -> list[Row]:
    known, rows = common.environment(device), []
    for b, h, n, d, l, stride in sizes:
        kv = draw(b, h, n, d, device)
        for name in NETWORKS:
            layer = layer_of(name, h, d, l, stride).to(device, torch.bfloat16)
            for way in ("copied", *(["sliding"] if slides(layer.k_compress) else [])):
                check(layer, kv, way)
                row: Row = {"network": name, "way": way, "b": b, "h": h, "n": n, "d": d}
                row |= {"l": l, "stride": stride, "dtype": "bfloat16"}
                row |= measure(layer, kv, way, seconds) | known
                print(f"{name:32} {way:8} n={n:<6} {row['forward_ms']:8.4f} ms", flush=True)
                common.append_row(out, row)
                rows.append(row)
                common.release()
    return rows


def cell(row: Row | None) -> str:
    if row is None:
        return ""
    told = f"{row['forward_ms']:.3f} / {row['backward_ms']:.3f}"
    return f"{told}; {row['kept']:.1f}, {row['peak']:.1f}" if "kept" in row else told


def table(rows: list[Row]) -> str:
    """Milliseconds forward / backward; units of keys and values kept, and at most; latest rows."""
    sizes = list(dict.fromkeys((row["b"], row["n"], row["d"], row["l"]) for row in rows))
    if not sizes:
        return NO_ROWS
    names = ("b", "n", "d", "l", "network", "way")
    latest = {tuple(row[name] for name in names): row for row in rows}
    titles = [f"b={b}, n={n // 1024}k, d={d}, l={l}" for b, n, d, l in sizes]
    lines = [["ms, forward / backward; kept, peak", *titles]]
    for network, way in dict.fromkeys(key[4:] for key in latest):
        cells = [cell(latest.get((*size, network, way))) for size in sizes]
        lines.append([f"{network}, {way}", *cells])
    last = rows[-1]
    where = f"{last['gpu']}, torch {last['torch']}"
    return f"{common.markdown(lines)}\n\n{where}, commit {last['commit'][:7]}."


def render(page: str, rows: list[Row]) -> str:
    """The page with its table drawn anew."""
    return common.redraw(page, "windows", table(rows))


def main(argv: list[str] | None = None) -> list[Row]:
    return common.command("windows", argv, PAGE, render, run, SIZES, [(2, 2, 300, 16, 8, 4)])


if __name__ == "__main__":
    main()
