"""Tokens a second of training the enwik8 model: forward, backward and optimizer, in bf16.

    python -m benchmarks.training              time every model at every length, append rows
    python -m benchmarks.training --table      redraw the table of docs/training.md from the rows
    python -m benchmarks.training --quick      a small model, nothing recorded

Before it is timed, a model's logits and gradients in bf16 are held against its own weights in
float32: at most so many times the error (root mean square) of eager PyTorch in bf16.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from native_sparse_attention import Transformer

from . import common
from .common import Row

PAGE = common.ROOT / "docs" / "training.md"
RESULTS = common.RESULTS / "training.jsonl"

MODEL = dict(num_tokens=256, dim=512, depth=6, heads=8, kv_heads=4, dim_head=64, causal=True)
SPARSE = dict(
    sliding_window_size=64,
    compress_block_size=16,
    compress_block_sliding_stride=8,
    selection_block_size=16,
    num_selected_blocks=4,
)
QUICK = dict(MODEL, dim=64, depth=2, dim_head=16)

Loss = Callable[[Tensor], Tensor]


class WrongResult(Exception):
    """A model whose numbers are off."""


def ours(model: dict[str, Any], **kwargs: Any) -> nn.Module:
    return Transformer(**model, use_sparse_attn=True, sparse_attn_kwargs={**SPARSE, **kwargs})


def dense(model: dict[str, Any]) -> nn.Module:
    return Transformer(**model, use_sparse_attn=False)


def published(model: dict[str, Any]) -> nn.Module:
    """native-sparse-attention-pytorch, by its Triton kernel and flex_attention where there are."""
    from native_sparse_attention_pytorch.transformer import Transformer as Published

    cuda = torch.cuda.is_available()
    kinds = dict(use_triton_fine_selection=cuda, use_flex_sliding_window=cuda)
    return Published(**model, use_sparse_attn=True, sparse_attn_kwargs=dict(SPARSE), **kinds)


# name: (the model, how its loss is called, factor of the error budget)
PROVIDERS: dict[str, tuple[Callable[[dict[str, Any]], nn.Module], str | None, float]] = {
    "ours, compiled with CUDA graphs": (ours, "reduce-overhead", 2.0),
    "ours, compiled": (ours, "default", 2.0),
    "ours": (ours, None, 2.0),
    "dense, compiled with CUDA graphs": (dense, "reduce-overhead", 2.0),
    "nsa-pytorch": (published, None, 4.0),
}


# the oracle


# tokens whose activations eager PyTorch holds at once
TOKENS_AT_ONCE = 8192


def results(
    net: nn.Module, loss_of: Loss, batches: list[Tensor], low: bool
) -> tuple[float, Tensor]:
    """The mean loss of equal batches, and all its gradients in one row."""
    net.zero_grad(set_to_none=True)
    total = 0.0
    for ids in batches:
        with torch.autocast(ids.device.type, torch.bfloat16, enabled=low):
            loss = loss_of(ids) / len(batches)
        loss.backward()
        total += loss.item()
    grads = [p.grad.float().flatten() for p in net.parameters() if p.grad is not None]
    # what is left in them would be added to
    found = torch.cat(grads)
    net.zero_grad(set_to_none=True)
    return total, found


def check(
    name: str, net: nn.Module, model: dict[str, Any], loss_of: Loss, ids: Tensor, factor: float
) -> None:
    """Raises WrongResult where the gradients err by more than `factor` times those of eager
    PyTorch in bf16, against float32."""
    twin: Any = ours(model) if not name.startswith("dense") else net
    if twin is not net:
        twin.load_state_dict(net.state_dict())
        twin = twin.to(ids.device)
        for attention, _ in twin.layers:
            attention.backend = "eager"

    def eager(batch: Tensor) -> Tensor:
        return twin(batch, return_loss=True)

    parts = list(ids.split(max(1, TOKENS_AT_ONCE // ids.shape[1])))
    parts = parts if len({len(part) for part in parts}) == 1 else list(ids.split(1))
    exact_loss, exact = results(twin, eager, parts, low=False)
    low_loss, low = results(twin, eager, parts, low=True)
    got_loss, got = results(net, loss_of, [ids], low=True)
    scale = exact.norm().item()
    error, of_low = ((x - exact).norm().item() / scale for x in (got, low))
    if not error <= factor * of_low + torch.finfo(torch.bfloat16).eps:
        raise WrongResult(f"gradients err by {error:.1e}, eager bf16 by {of_low:.1e}")
    off, of_low = abs(got_loss - exact_loss), abs(low_loss - exact_loss)
    if not off <= factor * of_low + torch.finfo(torch.bfloat16).eps * exact_loss:
        raise WrongResult(f"loss errs by {off:.1e}, eager bf16 by {of_low:.1e}")


# timing


def run(name: str, T: int, tokens: int, model: dict[str, Any], device: torch.device) -> Row:
    """Tokens a second of steps of `tokens` tokens, in sequences of T."""
    make, mode, factor = PROVIDERS[name]
    torch.manual_seed(0)
    torch._dynamo.reset()
    net: Any = make(model).to(device)
    forward = net if mode is None else torch.compile(net, mode=mode)

    def loss_of(ids: Tensor) -> Tensor:
        if mode == "reduce-overhead":
            torch.compiler.cudagraph_mark_step_begin()
        return forward(ids, return_loss=True)

    batch = max(1, tokens // T)
    ids = torch.randint(0, model["num_tokens"], (batch, T + 1), device=device)
    check(name, net, model, loss_of, ids, factor)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-4, fused=device.type == "cuda")

    def step() -> None:
        with torch.autocast(device.type, torch.bfloat16):
            loss = loss_of(ids)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    times = step_times(step, device)
    cuda = device.type == "cuda"
    peak = torch.cuda.max_memory_allocated() / 2**20 if cuda else None
    # a CUDA graph's activations lie in a pool of its own: allocated once, as it was recorded
    reserved = torch.cuda.max_memory_reserved() / 2**20 if cuda else None
    row = common.quantiles(times)
    return {
        "provider": name,
        "T": T,
        "batch": batch,
        "parameters": sum(p.numel() for p in net.parameters()),
        "tokens_per_s": round(batch * T / row["p50_ms"] * 1e3),
        **row,
        "steps": len(times),
        "peak_mib": peak and round(peak),
        "reserved_mib": reserved and round(reserved),
    }


def step_times(step: Callable[[], None], device: torch.device) -> list[float]:
    """ms from the end of one step to the end of the next, as training runs them: launching counts
    where it is what takes longest. Peaks of memory are those of these steps: what the checks
    before them left to the allocator is given back."""
    if device.type != "cuda":
        return common.time_cpu(step, 1.0)
    for _ in range(10):
        step()
    common.release()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    step()
    ends = [torch.cuda.Event(enable_timing=True) for _ in range(31)]
    for end in ends:
        step()
        end.record()
    torch.cuda.synchronize()
    return [a.elapsed_time(b) for a, b in itertools.pairwise(ends)]


# the table


def show(row: Row) -> str:
    fields = ("provider", "T", "tokens_per_s", "failed")
    return "  ".join(str(row[field]) for field in fields if field in row)


def table(rows: list[Row]) -> str:
    """Thousands of tokens a second, the latest row of each provider and length."""
    latest = {(row["provider"], row["T"]): row for row in rows}
    lengths = sorted({T for _, T in latest})
    lines = [["thousand tokens/s (GiB)", *(f"T = {T}" for T in lengths)]]
    for provider in dict.fromkeys(name for name, _ in latest):
        cells = []
        for T in lengths:
            row = latest.get((provider, T), {})
            cell = row.get("failed", "")
            if "tokens_per_s" in row:
                mib = row.get("reserved_mib") or row["peak_mib"]
                cell = f"{row['tokens_per_s'] / 1e3:.0f} ({mib / 1024:.1f})"
            cells.append(cell)
        lines.append([provider, *cells])
    last = rows[-1]
    commits = ", ".join(dict.fromkeys(str(row["commit"]) for row in latest.values()))
    where = "{gpu}, torch {torch}, triton {triton}".format(**last) + f", commits {commits}."
    return f"{common.markdown(lines)}\n\n{where}"


def render(page: str, rows: list[Row]) -> str:
    """The page with its table drawn anew."""
    return common.redraw(page, "throughput", table(rows))


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.training")
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 4096, 8192])
    parser.add_argument("--tokens", type=int, default=32768, help="tokens of a step")
    parser.add_argument("--providers", nargs="+", choices=PROVIDERS, default=list(PROVIDERS))
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--table", action="store_true", help="redraw the table of the rows there")
    parser.add_argument("--quick", action="store_true", help="a small model, nothing recorded")
    args = parser.parse_args(argv)
    if args.table:
        rows = common.read_rows(args.out)
        if not rows:
            sys.exit(f"{args.out} has no rows: run without --table first")
        PAGE.write_text(render(PAGE.read_text(encoding="utf-8"), rows), encoding="utf-8")
        return
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model, tokens, lengths, out = MODEL, args.tokens, args.lengths, args.out
    if args.quick:
        model, tokens, lengths, out = QUICK, 256, [128], None
    known = common.environment(device)
    for T in lengths:
        for name in args.providers:
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    row = run(name, T, tokens, model, device)
            except Exception as error:  # a model that fails leaves a row with its reason
                row = {"provider": name, "T": T, "failed": common.why(error)}
                if not common.still_alive(device):
                    raise
            common.release()
            print(show(row), flush=True)
            common.append_row(out, {**row, **known})


if __name__ == "__main__":
    main()
