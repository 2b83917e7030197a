"""Tokens a second of training the enwik8 model: forward, backward and optimizer, in bf16.

    python -m benchmarks.training              time every model at every length, append rows
    python -m benchmarks.training --table      redraw the table of results/training.md from the rows
    python -m benchmarks.training --quick      a small model, nothing recorded

Before it is timed, a model's logits and gradients in bf16 are held against its own weights in
float32: at most so many times the error (root mean square) of eager PyTorch in bf16.
"""

from __future__ import annotations

import functools
import itertools
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from native_sparse_attention import Transformer

from . import common
from .common import Row, WrongResult

PAGE = common.RESULTS / "training.md"
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


def table(rows: Sequence[Row]) -> str:
    """Thousands of tokens a second, the latest row of each provider and length."""
    if not rows:
        return common.NO_ROWS
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
    where = "{gpu}, torch {torch}, triton {triton}".format(**rows[-1])
    where += f", commits {common.seen(latest.values(), 'commit')}."
    return f"{common.markdown(lines)}\n\n{where}"


TABLES = {PAGE: {"throughput": table}}


def main(argv: list[str] | None = None) -> list[Row]:
    parser = common.parser_of("training", __doc__, seconds=None)
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 4096, 8192])
    parser.add_argument("--tokens", type=int, default=32768, help="tokens of a step")
    parser.add_argument("--providers", nargs="+", choices=PROVIDERS, default=list(PROVIDERS))
    args = parser.parse_args(argv)
    rows = common.read_rows(args.out or RESULTS)
    if args.table:
        common.draw_pages(TABLES, rows)
        return rows
    device, out = torch.device(args.device), common.out_of(args, RESULTS)
    model, tokens, lengths = MODEL, args.tokens, args.lengths
    if args.quick:
        model, tokens, lengths = QUICK, 256, [128]
    known, rows = common.environment(device), []
    for T in lengths:
        for name in args.providers:
            timed = functools.partial(run, name, T, tokens, model, device)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                row = {"provider": name, "T": T, **common.attempt(timed, device), **known}
            common.release()
            told = (str(row[field]) for field in ("tokens_per_s", "failed") if field in row)
            print(name, T, *told, flush=True)
            common.append_row(out, row)
            rows.append(row)
    return rows


if __name__ == "__main__":
    main()
