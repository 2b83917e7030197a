"""Host time, wall time, GPU time and kernel launches of the layer, against a dense twin.

    python -m benchmarks.layer                append rows to results/layer.jsonl
    python -m benchmarks.layer --table        redraw results/performance.md from the rows
    python -m benchmarks.layer --quick        tiny sizes, nothing recorded

Layers are those of `one_tree.py`: presets, and the dense twin, which has the same norm, projections
and rotary embedding around `F.scaled_dot_product_attention`. All run eager, in bf16, batch 1, in
one process, and take turns. Passes: "forward", "both" (forward and backward of the input and all
weights), and "decode": one new token over a KV cache, without a CUDA graph.

* host_ms: from the call until Python has control again, the GPU idle at the start.
* wall_ms: from the call until the GPU is done.
* busy_ms: time in which at least one kernel or copy runs. kernels: launches.

No layer is timed before its outputs and gradients passed the check against its own weights in fp32.
"""

from __future__ import annotations

import argparse
import copy
import functools
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from native_sparse_attention import KVCache

from . import common
from .attention import PAGE
from .common import Row, WrongResult
from .one_tree import PRESETS, Sizes, layer_of, passes
from .oracle import share_of_budget
from .twin import DenseCache

PROVIDERS = ("dense", *PRESETS)
PASSES = ("forward", "both", "decode")
# tokens of the check of which some blocks are selected, and less of which all are
CHECK_LENGTH = 2048
# a softmax does not see what all its keys have in common: the exact gradient is nearly 0
ZERO = "dk_intrablock_positions"
CHECKED_STEPS = 4

Call = Callable[[], Any]


# the oracle


def results(layer: Any, x: Tensor, d_out: Tensor) -> dict[str, Tensor]:
    """The output, and the gradients of the input and of the weights that have one."""
    x = x.detach().requires_grad_()
    layer.zero_grad(set_to_none=True)
    out = layer(x)
    out.backward(d_out)
    grads = {f"d{name}": p.grad for name, p in layer.named_parameters() if p.grad is not None}
    layer.zero_grad(set_to_none=True)
    return {"out": out.detach(), "dx": x.grad, **grads}  # type: ignore[dict-item]


def cache_of(name: str, max_length: int) -> Any:
    return DenseCache(max_length) if name == "dense" else KVCache(max_length)


@torch.no_grad()
def decoded(layer: Any, name: str, x: Tensor) -> Tensor:
    """The outputs of the last tokens of x, each a decode step of its own."""
    before, cache = x.shape[1] - CHECKED_STEPS, cache_of(name, x.shape[1])
    layer(x[:, :before], cache=cache)
    return torch.cat([layer(t, cache=cache) for t in x[:, before:].split(1, 1)], 1)


def check(layer: Any, name: str, at: Sizes) -> float:
    """Hold the layer to its weights in fp32 (eager): output and gradients, then decode steps, where
    every block is selected; then the output where some are. Returns the largest error as a share of
    its budget. Raises WrongResult."""
    low = copy.deepcopy(layer)
    low.backend = "eager"
    wide = torch.float64 if at.dtype == torch.float32 else torch.float32
    exact = copy.deepcopy(low).to(wide)
    length = CHECK_LENGTH // 8 if at.quick else CHECK_LENGTH
    x = at.draw(1, length // 4, at.dim)
    right = results(exact, x.to(wide), x.flip(1).to(wide))
    got, eager = results(layer, x, x.flip(1)), results(low, x, x.flip(1))
    right.pop(ZERO, None)
    shares = [share_of_budget(n, got[n], t.double(), eager[n]) for n, t in right.items()]
    ends = [t["out"][:, -CHECKED_STEPS:] for t in (right, eager)]
    shares.append(share_of_budget("decode", decoded(layer, name, x), ends[0].double(), ends[1]))
    x = at.draw(1, length, at.dim)
    with torch.no_grad():
        outs = layer(x), exact(x.to(wide)).double(), low(x)
    return max(*shares, share_of_budget("a median token", *outs, median=True))


# times


def clock(calls: dict[str, Call], repeats: int, device: torch.device) -> dict[str, Row]:
    """Medians in ms of host and wall times of calls, which take turns: a machine's speed changes
    from one second to the next."""
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in calls}
    for index in range(repeats + repeats // 5 + 1):
        for name, call in calls.items():
            began = common.synchronize(device)
            call()
            returned, ended = time.perf_counter(), common.synchronize(device)
            if index > repeats // 5:
                times[name].append(((returned - began) * 1e3, (ended - began) * 1e3))
    found = {}
    for name, both in times.items():
        host, wall = (round(statistics.median(of_kind), 5) for of_kind in zip(*both, strict=True))
        found[name] = {"host_ms": host, "wall_ms": wall, "repeats": repeats}
    return found


def summary(events: list[dict[str, Any]]) -> Row:
    """Kernels of a trace, whose times are in microseconds, and the length of the union of their
    intervals and of those of copies."""
    kinds = ("kernel", "gpu_memcpy", "gpu_memset")
    work = [event for event in events if event.get("cat") in kinds]
    total, end = 0.0, float("-inf")
    for start, duration in sorted((event["ts"], event["dur"]) for event in work):
        total += max(0.0, start + duration - max(start, end))
        end = max(end, start + duration)
    count = sum(event["cat"] == "kernel" for event in work)
    return {"busy_ms": round(total / 1e3, 5), "kernels": count}


def profiled(call: Call, device: torch.device) -> Row:
    """Of one call, by torch.profiler; None for each where there is no GPU."""
    if device.type != "cuda":
        return {"busy_ms": None, "kernels": None}
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    events: list[dict[str, Any]] = []
    for _ in range(2):  # the first starts the profiler itself
        torch.cuda.synchronize(device)
        with torch.profiler.profile(activities=activities) as profile:
            call()
            torch.cuda.synchronize(device)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "trace.json"
            profile.export_chrome_trace(str(path))
            events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    return summary(events)


def decode_step(layer: Any, name: str, S: int, at: Sizes) -> Call:
    """A call that decodes one token more over a cache of S tokens."""
    cache, token = cache_of(name, S + 2 * at.repeats + 8), at.draw(1, 1, at.dim)
    with torch.no_grad():
        layer(at.draw(1, S, at.dim), cache=cache)
    return torch.no_grad()(functools.partial(layer, token, cache=cache))


# the table

FIELDS = {"wall_ms": "wall, ms", "host_ms": "host, ms", "busy_ms": "GPU, ms", "kernels": "kernels"}


def wall_table(rows: Sequence[Row]) -> str:
    """Of each measure what the layers take."""
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


TABLES = {PAGE: {"wall": wall_table}}


# the program


def options(parser: argparse.ArgumentParser) -> None:
    add, lengths = parser.add_argument, [1024, 4096, 16384]
    add("--lengths", type=int, nargs="+", default=lengths, metavar="T", help="of both passes")
    add("--cached", type=int, nargs="+", default=lengths[1:], metavar="S", help="tokens in a cache")
    add("--providers", nargs="+", choices=PROVIDERS, default=PROVIDERS)


def run(args: argparse.Namespace, recorder: common.Recorder) -> None:
    """Rows of all layers; one whose results are wrong leaves a row that says so."""
    at, lengths, cached = Sizes(args.quick, args.device), args.lengths, args.cached
    if args.quick:
        lengths, cached = [at.short], [at.short]
    head = dict(dim=at.dim, H=at.heads, K=at.kv_heads, D=at.width, dtype=str(at.dtype)[6:])
    shares: dict[str, float] = {}
    for name in args.providers:
        try:
            shares[name] = round(check(layer_of(at, name, CHECK_LENGTH), name, at), 3)
        except WrongResult as error:
            recorder.add({"provider": name, **head, "failed": f"wrong: {error}"})
        common.release()

    def add(which: str, T: int, calls: dict[str, Call]) -> None:
        times = clock(calls, at.repeats, args.device)
        for name, call in calls.items():
            row = {"provider": name, **head, "pass": which, "T": T, **times[name]}
            recorder.add({**row, **profiled(call, args.device), "error_share": shares[name]})
        common.release()

    for T in lengths:
        x = at.draw(1, T, at.dim).requires_grad_()
        every = {name: dict(passes(layer_of(at, name, T), x)) for name in shares}
        for which in ("forward", "both"):
            add(which, T, {name: calls[which] for name, calls in every.items()})
    for S in cached:
        add("decode", S, {name: decode_step(layer_of(at, name, S), name, S, at) for name in shares})


BENCHMARK = common.Benchmark("layer", __doc__, options, run, ("provider", "pass", "T"), TABLES)
main = BENCHMARK.main

if __name__ == "__main__":
    main()
