"""Host time, wall time, GPU time and kernel launches of the layer, against a dense twin.

    python -m benchmarks.layer                append rows to results/layer.jsonl
    python -m benchmarks.layer --table        redraw results/performance.md from the rows
    python -m benchmarks.layer --quick        tiny sizes, nothing recorded

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
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from native_sparse_attention import KVCache, SparseAttention
from native_sparse_attention.compress import MeanPool

from . import common
from .attention import PAGE
from .common import Row, WrongResult
from .oracle import share_of_budget
from .problem import Setting
from .twin import DenseAttention, DenseCache

PROVIDERS = ("dense", "sparse")
CHECK_LENGTH = 2048
# a softmax does not see what all its keys have in common, and there are no memory slots: the exact
# gradient is 0, and what is found is rounding
ZERO = "dk_intrablock_positions"
CHECKED_STEPS = 4

Call = Callable[[], Any]


@dataclasses.dataclass(frozen=True)
class Plan:
    """What is timed. setting.T is a placeholder: lengths and cached have the lengths."""

    setting: Setting = dataclasses.field(default_factory=lambda: Setting(0, H=32, K=8))
    dim: int = 4096
    lengths: tuple[int, ...] = (1024, 4096, 16384)
    cached: tuple[int, ...] = (4096, 16384)
    check_length: int = CHECK_LENGTH
    repeats: int = 50
    warmup: int = 10


def tiny() -> Plan:
    setting = Setting(
        0, 4, 2, D=16, l=8, d=4, s=16, n=3, initial=1, local=2, w=31, dtype=torch.float32
    )
    sizes: dict[str, Any] = dict(lengths=(96, 160), cached=(96,))
    return Plan(setting, 32, check_length=128, repeats=3, warmup=1, **sizes)


# the two layers


def layer_of(name: str, plan: Plan, device: torch.device) -> nn.Module:
    c = plan.setting
    torch.manual_seed(0)
    if name == "dense":
        return DenseAttention(plan.dim, c.H, c.K, c.D).to(device, c.dtype)
    layer = SparseAttention(
        plan.dim, c.D, c.H, c.w, c.l, c.s, c.n, kv_heads=c.K, num_compressed_mem_kv=0, causal=True,
        compress_mlp=MeanPool(), compress_block_sliding_stride=c.d, **c.forced,
    )  # fmt: skip
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
    grads = {f"d{name}": p.grad for name, p in layer.named_parameters() if p.grad is not None}
    tensors = {"out": out.detach(), "dx": x.grad, **grads}
    clear(layer, x)
    return {name: t for name, t in tensors.items() if t is not None}


def decoded(layer: nn.Module, name: str, x: Tensor) -> Tensor:
    """The outputs of the last tokens of x, each a decode step of its own."""
    before = x.shape[1] - CHECKED_STEPS
    cache = cache_of(name, x.shape[1])
    with torch.no_grad():
        layer(x[:, :before], cache=cache)
        return torch.cat([layer(t, cache=cache) for t in x[:, before:].split(1, 1)], 1)


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
    shares = [share_of_budget(n, got[n], t.double(), eager[n]) for n, t in right.items()]
    ends = [t["out"][:, -CHECKED_STEPS:] for t in (right, eager)]
    shares.append(share_of_budget("decode", decoded(layer, name, x), ends[0].double(), ends[1]))
    x = draw(plan, plan.check_length, device)
    with torch.no_grad():
        outs = layer(x), exact(x.to(wide)).double(), low(x)
    return max(*shares, share_of_budget("a median token", *outs, median=True))


# times


def clock(calls: dict[str, tuple[Call, Call]], plan: Plan, device: torch.device) -> dict[str, Row]:
    """Medians in ms of host and wall times of calls, which take turns: a machine's speed changes
    from one second to the next. What runs before each is not timed."""
    times: dict[str, tuple[list[float], list[float]]] = {name: ([], []) for name in calls}
    for index in range(plan.warmup + plan.repeats):
        for name, (call, before) in calls.items():
            before()
            began = common.synchronize(device)
            call()
            returned, ended = time.perf_counter(), common.synchronize(device)
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


# the table


def wall_table(rows: Sequence[Row]) -> str:
    """Of each measure what the sparse and the dense layer take."""
    cells = [
        row | {"line": f"{text}, {row['provider']}", "value": row[field]}
        for field, text in FIELDS.items()
        for row in rows
        if row.get("pass") in PASSES and row.get(field) is not None
    ]
    return common.grid(
        cells, "", lambda row: row["line"], lambda row: (row["pass"], row["T"]),
        lambda passes: " ".join(f"{row['value']:.3g}" for row in passes.values()),
        lambda row: row["gpu"],
    )  # fmt: skip


PASSES = ("forward", "both", "decode")
FIELDS = {"wall_ms": "wall, ms", "host_ms": "host, ms", "busy_ms": "GPU, ms", "kernels": "kernels"}
TABLES = {PAGE: {"wall": wall_table}}


# the program


def options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--lengths", type=int, nargs="+", metavar="T", help="of forward and backward")
    add("--cached", type=int, nargs="+", metavar="S", help="tokens in the cache of a decode step")
    add("--repeats", type=int, help="timed calls of each pass")


def run(args: argparse.Namespace, recorder: common.Recorder) -> None:
    """Rows of both layers; one whose results are wrong leaves a row that says so."""
    device, plan = args.device, tiny() if args.quick else Plan()
    changes = {n: v for n in ("lengths", "cached", "repeats") if (v := getattr(args, n))}
    plan = dataclasses.replace(plan, **changes)
    head = {"dim": plan.dim, **plan.setting.row()}
    layers: dict[str, nn.Module] = {}
    shares: dict[str, float] = {}
    for name in PROVIDERS:
        layer = layer_of(name, plan, device)
        try:
            shares[name] = round(check(layer, name, plan, device), 3)
            layers[name] = layer
        except WrongResult as error:
            recorder.add({"provider": name, **head, "failed": f"wrong: {error}"})
        common.release()
    for row in measure(layers, plan, device):
        recorder.add({**head, **row, "error_share": shares[row["provider"]]})


BENCHMARK = common.Benchmark("layer", __doc__, options, run, ("provider", "pass", "T"), TABLES)
main = BENCHMARK.main

if __name__ == "__main__":
    main()
