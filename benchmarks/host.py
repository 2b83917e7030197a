"""Host time, wall time, GPU time and kernel launches of the layer, against a dense twin.

    python -m benchmarks.host                append rows to results/host.jsonl, print the table
    python -m benchmarks.host --first-call   first calls of fresh processes, Triton's cache empty
    python -m benchmarks.host --table        redraw docs/performance.md, print the table
    python -m benchmarks.host --quick        tiny sizes, nothing recorded

The layer is `SparseAttention` with mean pooling; the twin has the same norm, projections and rotary
embedding around `F.scaled_dot_product_attention`. Both run eager, in bf16, batch 1, in one process.
Passes: "forward", "both" (forward and backward of the input and all weights), and "decode": one new
token over a KV cache, without a CUDA graph.

* host_ms: from the call until Python has control again, the GPU idle at the start.
* wall_ms: from the call until the GPU is done.
* gpu_ms: sum of kernel durations. busy_ms: time in which at least one kernel or copy runs.
* kernels, copies: launches of kernels; copies and fills (memcpy, memset), which are no kernels.

No layer is timed before its outputs and gradients passed the check against its own weights in fp32.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import functools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from native_sparse_attention import KVCache, SparseAttention
from native_sparse_attention.compress import MeanPool
from native_sparse_attention.rotary import Rotary, rotate

from . import common, goals, host_report
from .cases import NO_ROWS, length
from .common import Row
from .oracle import WrongResult
from .problem import Setting

RESULTS = common.RESULTS / "host.jsonl"
PROVIDERS = ("dense", "sparse")
CHECK_LENGTH = 2048
# of the error of eager PyTorch in the same dtype
FACTOR = 2.0
# a softmax does not see what all its keys have in common, and there are no memory slots: the exact
# gradient is 0, and what is found is rounding
ZERO = "dk_intrablock_positions"
CHECKED_STEPS = 4

# of a dense decode step: cuDNN builds a plan for each length of the cache, in 34 ms (H100)
STEP_BACKENDS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]

Call = Callable[[], Any]


@dataclasses.dataclass(frozen=True)
class Plan:
    """What is timed. setting.T is a placeholder: lengths and cached have the lengths."""

    setting: Setting = dataclasses.field(default_factory=lambda: Setting(0, H=32, K=8))
    dim: int = 4096
    lengths: tuple[int, ...] = (1024, 4096, 16384)
    cached: tuple[int, ...] = (4096, 16384)
    first_lengths: tuple[int, int] = (2048, 16384)  # of the first call, and the new length
    check_length: int = CHECK_LENGTH
    repeats: int = 50
    warmup: int = 10
    out: Path | None = None


def tiny() -> Plan:
    setting = Setting(
        0, 4, 2, D=16, l=8, d=4, s=16, n=3, initial=1, local=2, w=31, dtype=torch.float32
    )
    sizes: dict[str, Any] = dict(lengths=(96, 160), cached=(96,), first_lengths=(96, 160))
    return Plan(setting, 32, check_length=128, repeats=3, warmup=1, **sizes)


# the two layers


class DenseAttention(nn.Module):
    """The dense twin: the norm, the projections and the rotary embedding of `SparseAttention`."""

    backend = "auto"

    def __init__(self, dim: int, heads: int, kv_heads: int, dim_head: int) -> None:
        super().__init__()
        self.dim_head, self.split = dim_head, (heads * dim_head, *(kv_heads * dim_head,) * 2)
        self.grouped = heads != kv_heads
        self.norm = nn.RMSNorm(dim)
        self.to_qkv = nn.Linear(dim, sum(self.split), bias=False)
        self.rotary = Rotary(dim_head)
        self.combine_heads = nn.Linear(heads * dim_head, dim, bias=False)

    def forward(self, x: Tensor, cache: DenseCache | None = None) -> Tensor:
        parts = self.to_qkv(self.norm(x)).split(self.split, dim=-1)
        q, k, v = (t.unflatten(-1, (-1, self.dim_head)).transpose(1, 2) for t in parts)
        start = 0 if cache is None else cache.size
        q, k = rotate(self.rotary, [q, k], start, None, self.backend)
        if cache is not None:
            k, v = cache.append(k, v)
        causal = q.shape[2] > 1
        attend = functools.partial(F.scaled_dot_product_attention, is_causal=causal)
        kinds = [SDPBackend.MATH] if self.backend == "eager" else [] if causal else STEP_BACKENDS
        with sdpa_kernel(kinds) if kinds else nullcontext():
            out = attend(q, k, v, enable_gqa=self.grouped)
        return self.combine_heads(out.transpose(1, 2).flatten(2))


class DenseCache:
    """Keys and values [b h s d] of the tokens so far, in storage allocated once."""

    def __init__(self, max_length: int) -> None:
        self.size, self.max_length = 0, max_length
        self.stored: list[Tensor] = []

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        if not self.stored:
            b, h, _, d = k.shape
            self.stored = [t.new_empty(b, h, self.max_length, d) for t in (k, v)]
        end = self.size + k.shape[2]
        for stored, t in zip(self.stored, (k, v), strict=True):
            stored[:, :, self.size : end] = t
        self.size = end
        return self.stored[0][:, :, :end], self.stored[1][:, :, :end]


def layer_of(name: str, plan: Plan, device: torch.device) -> nn.Module:
    c = plan.setting
    torch.manual_seed(0)
    layer: nn.Module
    if name == "dense":
        layer = DenseAttention(plan.dim, c.H, c.K, c.D)
    else:
        layer = SparseAttention(
            plan.dim,
            c.D,
            c.H,
            c.w,
            c.l,
            c.s,
            c.n,
            kv_heads=c.K,
            num_compressed_mem_kv=0,
            causal=True,
            compress_mlp=MeanPool(),
            compress_block_sliding_stride=c.d,
            **c.forced,
        )
    return layer.to(device, c.dtype)


def cache_of(name: str, max_length: int) -> Any:
    return DenseCache(max_length) if name == "dense" else KVCache(max_length)


def draw(plan: Plan, T: int, device: torch.device, batch: int = 1) -> Tensor:
    generator = torch.Generator(device).manual_seed(T)
    shape = (batch, T, plan.dim)
    return torch.randn(shape, generator=generator, device=device, dtype=plan.setting.dtype)


def clear(layer: nn.Module, x: Tensor) -> None:
    layer.zero_grad(set_to_none=True)
    x.grad = None


# the oracle


def results(layer: nn.Module, x: Tensor, d_out: Tensor) -> dict[str, Tensor]:
    """The output, and the gradients of the input and of the weights that have one."""
    x = x.detach().requires_grad_()
    clear(layer, x)
    out = layer(x)
    out.backward(d_out)
    grads = {name: p.grad for name, p in layer.named_parameters() if p.grad is not None}
    found = {"out": out.detach(), "dx": x.grad, **{f"d{name}": g for name, g in grads.items()}}
    clear(layer, x)
    return {name: t for name, t in found.items() if t is not None}


def decoded(layer: nn.Module, name: str, x: Tensor) -> Tensor:
    """The outputs of the last tokens of x, each a decode step of its own."""
    before = x.shape[1] - CHECKED_STEPS
    cache = cache_of(name, x.shape[1])
    with torch.no_grad():
        layer(x[:, :before], cache=cache)
        return torch.cat([layer(t, cache=cache) for t in x[:, before:].split(1, 1)], 1)


def within_budget(name: str, got: Tensor, exact: Tensor, low: Tensor) -> float:
    """The error (root mean square) as a share of its budget: `FACTOR` times that of eager PyTorch
    in the same dtype, and one unit in the last place.

    Raises:
        WrongResult: an error above its budget.
    """
    scale = exact.norm().item()
    error, lowp = ((t.double() - exact).norm().item() for t in (got, low))
    # gradients of weights are sums over all tokens, formed in fp32
    budget = FACTOR * lowp + torch.finfo(got.dtype).eps * scale
    if not error <= budget:
        raise WrongResult(f"{name} errs by {error:.2e}, above {budget:.2e}")
    return error / budget if budget else 0.0


def rows_within_budget(got: Tensor, exact: Tensor, low: Tensor) -> float:
    """As `within_budget`, of the median over tokens of each token's error: near-ties of the ranking
    go one way or the other, and the few tokens that have one err by a whole block.

    Raises:
        WrongResult
    """
    error, lowp = ((t.double() - exact).norm(dim=-1).median().item() for t in (got, low))
    scale = exact.norm(dim=-1).median().item()
    budget = FACTOR * lowp + torch.finfo(got.dtype).eps * scale
    if not error <= budget:
        raise WrongResult(f"a median token errs by {error:.2e}, above {budget:.2e}")
    return error / budget if budget else 0.0


def check(layer: nn.Module, name: str, plan: Plan, device: torch.device) -> float:
    """Hold the layer to its weights in fp32 (eager): output and gradients, then decode steps, at a
    length at which every block is selected; then the output of `check_length` tokens, which select
    some. Returns the largest error as a share of its budget.

    Raises:
        WrongResult
    """
    c = plan.setting
    low: Any = copy.deepcopy(layer)
    low.backend = "eager"
    wide = torch.float64 if c.dtype == torch.float32 else torch.float32
    exact = copy.deepcopy(low).to(wide)
    S = c.s * (c.n + c.initial + c.local)
    x, d_out = draw(plan, S, device), draw(plan, S, device).flip(1)
    right = results(exact, x.to(wide), d_out.to(wide))
    got, eager = results(layer, x, d_out), results(low, x, d_out)
    right.pop(ZERO, None)
    shares = [within_budget(n, got[n], t.double(), eager[n]) for n, t in right.items()]
    ends = [t["out"][:, -CHECKED_STEPS:] for t in (right, eager)]
    shares.append(within_budget("decode", decoded(layer, name, x), ends[0].double(), ends[1]))
    x = draw(plan, plan.check_length, device)
    with torch.no_grad():
        outs = layer(x), exact(x.to(wide)).double(), low(x)
    shares.append(rows_within_budget(*outs))
    return max(shares)


# times


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def clock(calls: dict[str, tuple[Call, Call]], plan: Plan, device: torch.device) -> dict[str, Row]:
    """Medians in ms of host and wall times of calls, which take turns: a machine's speed changes
    from one second to the next. What runs before each is not timed."""
    times: dict[str, tuple[list[float], list[float]]] = {name: ([], []) for name in calls}
    for index in range(plan.warmup + plan.repeats):
        for name, (call, before) in calls.items():
            before()
            synchronize(device)
            began = time.perf_counter()
            call()
            returned = time.perf_counter()
            synchronize(device)
            ended = time.perf_counter()
            if index >= plan.warmup:
                times[name][0].append((returned - began) * 1e3)
                times[name][1].append((ended - began) * 1e3)
    return {
        name: {
            "host_ms": round(statistics.median(host), 5),
            "wall_ms": round(statistics.median(wall), 5),
            "host_p80_ms": common.quantiles(host)["p80_ms"],
            "repeats": plan.repeats,
        }
        for name, (host, wall) in times.items()
    }


def busy(intervals: list[tuple[float, float]]) -> float:
    """The length of the union of (start, duration)."""
    total, end = 0.0, float("-inf")
    for start, duration in sorted(intervals):
        total += max(0.0, start + duration - max(start, end))
        end = max(end, start + duration)
    return total


def summary(events: list[dict[str, Any]]) -> Row:
    """GPU times and launches of the events of a trace, whose times are in microseconds."""
    kinds = ("kernel", "gpu_memcpy", "gpu_memset")
    by_kind = {kind: [e for e in events if e.get("cat") == kind] for kind in kinds}
    kernels = by_kind["kernel"]
    copies = by_kind["gpu_memcpy"] + by_kind["gpu_memset"]
    return {
        "gpu_ms": round(sum(e["dur"] for e in kernels) / 1e3, 5),
        "busy_ms": round(busy([(e["ts"], e["dur"]) for e in kernels + copies]) / 1e3, 5),
        "kernels": len(kernels),
        "copies": len(copies),
    }


def profiled(call: Call, before: Call, device: torch.device) -> Row:
    """Of one call, by torch.profiler; None for each where there is no GPU."""
    if device.type != "cuda":
        return dict.fromkeys(("gpu_ms", "busy_ms", "kernels", "copies"))
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    events: list[dict[str, Any]] = []
    for _ in range(2):  # the first starts the profiler itself
        before()
        torch.cuda.synchronize(device)
        with torch.profiler.profile(activities=activities) as profile:
            call()
            torch.cuda.synchronize(device)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "trace.json"
            profile.export_chrome_trace(str(path))
            events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    return summary(events)


def nothing() -> None:
    """Before a call that leaves nothing behind."""


def passes(
    layer: nn.Module, plan: Plan, T: int, device: torch.device
) -> dict[str, tuple[Call, Call]]:
    """Of whole sequences: what is timed by its name, and what runs before it."""
    x = draw(plan, T, device).requires_grad_()
    d_out = torch.ones_like(x)

    def both() -> None:
        layer(x).backward(d_out)

    return {"forward": (lambda: layer(x), nothing), "both": (both, lambda: clear(layer, x))}


def decode_step(layer: nn.Module, name: str, plan: Plan, S: int, device: torch.device) -> Call:
    """A call that decodes one token more over a cache of S tokens."""
    # two calls go to the profiler
    cache = cache_of(name, S + plan.warmup + plan.repeats + 2)
    token = draw(plan, 1, device)
    with torch.no_grad():
        layer(draw(plan, S, device), cache=cache)

    def step() -> Tensor:
        with torch.no_grad():
            return layer(token, cache=cache)

    return step


def measure(layers: dict[str, nn.Module], plan: Plan, device: torch.device) -> list[Row]:
    rows: list[Row] = []

    def add(which: str, T: int, calls: dict[str, tuple[Call, Call]]) -> None:
        times = clock(calls, plan, device)
        for name, (call, before) in calls.items():
            row = {"provider": name, "pass": which, "T": T, **times[name]}
            rows.append({**row, **profiled(call, before, device)})

    for T in plan.lengths:
        every = {name: passes(layer, plan, T, device) for name, layer in layers.items()}
        for which in ("forward", "both"):
            add(which, T, {name: found[which] for name, found in every.items()})
        for layer in layers.values():
            layer.zero_grad(set_to_none=True)
        del every
        common.release()
    for S in plan.cached:
        steps = {name: decode_step(layer, name, plan, S, device) for name, layer in layers.items()}
        add("decode", S, {name: (step, nothing) for name, step in steps.items()})
        del steps
        common.release()
    return rows


def head(name: str, plan: Plan) -> Row:
    fields = dataclasses.replace(plan.setting, T=0).row()
    del fields["T"]
    return {"provider": name, "dim": plan.dim, **fields}


def run(plan: Plan, device: torch.device) -> list[Row]:
    """Rows of both layers; one whose results are wrong leaves a row that says so."""
    known, rows = common.environment(device), []
    layers: dict[str, nn.Module] = {}
    shares: dict[str, float] = {}
    for name in PROVIDERS:
        layer = layer_of(name, plan, device)
        try:
            shares[name] = round(check(layer, name, plan, device), 3)
            layers[name] = layer
        except WrongResult as error:
            rows.append({**head(name, plan), "failed": f"wrong: {error}", **known})
        common.release()
    for row in measure(layers, plan, device):
        name = row["provider"]
        rows.append({**head(name, plan), **row, "error_share": shares[name], **known})
    for row in rows:
        common.append_row(plan.out, row)
    return rows


# first calls


def compiled(folder: Path) -> int:
    """Kernels that Triton has compiled into its cache."""
    return sum(1 for _ in folder.rglob("*.cubin"))


def first_calls(name: str, plan: Plan, device: torch.device) -> list[Row]:
    """Forward and backward in this process, one form after another, the layer built before."""
    first, other = plan.first_lengths
    layer = layer_of(name, plan, device)
    cuts = {"documents": (0, first // 3, first), "other documents": (0, first // 2 + 1, first)}
    forms: dict[str, tuple[int, int, tuple[int, ...] | None]] = {
        "first": (1, first, None),
        "again": (1, first, None),
        "length": (1, other, None),
        "batch": (2, first, None),
    }
    if name == "sparse":
        forms |= {form: (1, first, offsets) for form, offsets in cuts.items()}
    folder = Path(os.environ["TRITON_CACHE_DIR"])
    rows: list[Row] = []
    for form, (batch, T, offsets) in forms.items():
        x = draw(plan, T, device, batch).requires_grad_()
        d_out, options = torch.ones_like(x), {}
        if offsets is not None:
            options["cu_seqlens"] = torch.tensor(offsets, dtype=torch.int32, device=device)
        synchronize(device)
        before, began = compiled(folder), time.perf_counter()
        layer(x, **options).backward(d_out)
        synchronize(device)
        seconds = round(time.perf_counter() - began, 4)
        count = compiled(folder) - before if device.type == "cuda" else None
        row: Row = {"pass": "first call", "form": form, "batch": batch, "T": T}
        rows.append({**row, "seconds": seconds, "compiled": count})
        layer.zero_grad(set_to_none=True)
    return rows


def run_first_calls(plan: Plan, quick: bool, device: torch.device) -> list[Row]:
    """A fresh process for each layer, with an empty Triton cache."""
    known, rows = common.environment(device), []
    for name in PROVIDERS:
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, "-m", "benchmarks.host", "--child", name]
            command += ["--device", str(device), *(["--quick"] if quick else [])]
            done = subprocess.run(
                command,
                cwd=common.ROOT,
                env={**os.environ, "TRITON_CACHE_DIR": folder},
                capture_output=True,
                text=True,
            )
        if done.returncode:
            lines = done.stderr.strip().splitlines() or ["no message"]
            found: list[Row] = [{"pass": "first call", "failed": lines[-1][:300]}]
        else:
            found = json.loads(done.stdout.strip().splitlines()[-1])
        for row in found:
            row = {**head(name, plan), **row, **known}
            common.append_row(plan.out, row)
            rows.append(row)
    return rows


# the table


def ratio(a: float | None, b: float | None) -> str:
    return "" if a is None or not b else f"{a / b:.2f}"


def shown(value: float | None) -> str:
    if value is None:
        return ""
    return str(value) if isinstance(value, int) else f"{value:.3g}"


def target(field: str, which: str, T: int, form: str | None) -> str:
    if field == "host_ms":
        return f"ratio <= {goals.MOST_HOST:g}"
    if field == "kernels" and which == "both":
        return f"sparse <= {goals.MOST_KERNELS}"
    if field == "wall_ms" and which == "both" and T in goals.LEAST_WALL:
        return f"ratio <= 1/{goals.LEAST_WALL[T]:g}"
    if field == "seconds" and form == "first":
        return f"sparse <= {goals.MOST_FIRST_CALL:g} s"
    return ""


def table(rows: Sequence[Row]) -> str:
    """Sparse, dense, their ratio and the target, of the latest rows of the GPU of the last row."""
    if not rows:
        return NO_ROWS
    rows = [row for row in rows if row["gpu"] == rows[-1]["gpu"]]
    fields = ("host_ms", "wall_ms", "gpu_ms", "busy_ms", "kernels", "copies", "seconds", "compiled")
    cases: dict[tuple[str, int, str | None], dict[str, Row]] = {}
    for row in rows:
        if "failed" not in row:
            case = (row["pass"], row["T"], row.get("form"))
            cases.setdefault(case, {})[row["provider"]] = row
    lines = [["", "sparse", "dense", "sparse / dense", "target"]]
    for (which, T, form), found in cases.items():
        name = ", ".join(part for part in (which, form, length(T)) if part)
        for field in fields:
            sparse, dense = (found.get(n, {}).get(field) for n in ("sparse", "dense"))
            if sparse is not None or dense is not None:
                cells = [shown(sparse), shown(dense), ratio(sparse, dense)]
                lines.append([f"{name}: {field}", *cells, target(field, which, T, form)])
    failed = [f"* {row['provider']}: {row['failed']}" for row in rows if "failed" in row]
    last = rows[-1]
    where = f"{last['gpu']}, torch {last['torch']}, triton {last['triton']}, "
    where += f"commit {str(last['commit'])[:7]}."
    return "\n".join([common.markdown(lines), "", where, *failed])


# the command line


def main(argv: list[str] | None = None) -> list[Row]:
    parser = argparse.ArgumentParser(
        prog="benchmarks.host", description=(__doc__ or "").split("\n")[0]
    )
    add = parser.add_argument
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add("--lengths", type=int, nargs="+", metavar="T", help="of forward and backward")
    add("--cached", type=int, nargs="+", metavar="S", help="tokens in the cache of a decode step")
    add("--repeats", type=int, help="timed calls of each pass")
    add("--first-call", action="store_true", help="first calls of fresh processes instead")
    add("--out", type=Path, help="JSONL; results/host.jsonl, none with --quick")
    add("--table", action="store_true", help="redraw the page's tables, print the rows")
    add("--quick", action="store_true", help="tiny sizes, nothing recorded")
    add("--child", choices=PROVIDERS, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.table:
        rows = common.read_rows(args.out or RESULTS)
        host_report.draw(rows)
        print(table(rows))
        return rows
    device = torch.device(args.device)
    plan = tiny() if args.quick else Plan()
    given = dict(lengths=args.lengths, cached=args.cached)
    changes: dict[str, Any] = {name: tuple(value) for name, value in given.items() if value}
    if args.repeats:
        changes["repeats"] = args.repeats
    out = args.out or (None if args.quick else RESULTS)
    plan = dataclasses.replace(plan, out=out, **changes)
    if args.child:
        print(json.dumps(first_calls(args.child, plan, device)))
        return []
    rows = run_first_calls(plan, args.quick, device) if args.first_call else run(plan, device)
    print(table(rows), flush=True)
    failed = [row for row in rows if "failed" in row]
    if failed:
        raise SystemExit(f"{failed[0]['provider']} not timed: {failed[0]['failed']}")
    return rows


if __name__ == "__main__":
    main()
