"""Training on several GPUs against one: time of a step, efficiency, memory, communication.

    torchrun --nproc-per-node 2 -m benchmarks.distributed            measure, append rows
    torchrun --nproc-per-node 2 -m benchmarks.distributed --quick    small, nothing recorded
    python -m benchmarks.distributed --table                         redraw docs/scaling.md

Subjects: a `Transformer` of 1 B (dim 2048, depth 16, 32 query heads, 4 KV heads of 128), a step of
AdamW in bf16 with activation checkpointing and FSDP2, on one GPU, data parallel (a row on each) and
context parallel (one row); and one of its layers over 1M tokens, forward and both passes. Medians
of 5 by the clock. "exposed": time of NCCL kernels while no other kernel runs, in a trace of a step.

Before anything is timed, layers are held against their own weights in fp32 on the eager backend, at
most twice the error of that backend in bf16, and losses of three steps against those of one GPU.
"""

from __future__ import annotations

import argparse
import copy
import datetime
import functools
import json
import math
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils._python_dispatch import TorchDispatchMode

from native_sparse_attention import SparseAttention, Transformer
from native_sparse_attention.distributed import (
    context_parallel,
    context_parallel_shard,
    context_parallel_unshard,
    parallelize,
)
from native_sparse_attention.presets import preset

from . import clock, common, scaling
from .common import Row, WrongResult
from .scaling import HEADS, MODEL

PAGE = common.ROOT / "docs" / "scaling.md"
FORMS = (scaling.FORM, "one softmax", "three branches")  # of layers; the first two of models
MODES = ("one", "dp", "cp")
SMALL = dict(dim=64, depth=2, heads=4, kv_heads=2, dim_head=16)
LENGTHS, LAYER_LENGTH = (65536, 262144), 2**20
# tokens of the checks, which eager PyTorch can run
CHECKED = 2048
# bf16 losses of three steps, in another order of sums
LOSS_TOLERANCE = 0.01

# FSDP2's are of c10d, those of context parallelism functional
COLLECTIVES = {
    "c10d::_allgather_base_": "weights", "c10d::_reduce_scatter_base_": "gradients",
    "_c10d_functional::all_gather_into_tensor": "keys",
    "_c10d_functional::reduce_scatter_tensor": "gradients of keys",
}  # fmt: skip

Spans = list[tuple[float, float]]


def mesh_of(mode: str, device: torch.device) -> DeviceMesh:
    """All ranks as one dimension, or each rank alone."""
    ranks = torch.arange(dist.get_world_size())
    if mode == "one":
        return DeviceMesh(device.type, ranks[:, None], mesh_dim_names=("copy", "dp"))["dp"]
    return DeviceMesh(device.type, ranks, mesh_dim_names=(mode,))


def settings_of(form: str, T: int) -> dict[str, Any]:
    return preset(clock.FORMS[form][0], T, clock.FORMS[form][1])


# layers


def make_layer(form: str, T: int, quick: bool, device: torch.device) -> SparseAttention:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {**MODEL, **(SMALL if quick else {})}
    sizes = {name: sizes[name] for name in ("dim", "causal", *HEADS)} | {"sliding_window_size": 0}
    return SparseAttention(**sizes | settings_of(form, T)).to(device, torch.bfloat16)


def sharded_outputs(net: SparseAttention, x: Tensor, mesh: DeviceMesh) -> dict[str, Tensor]:
    """`clock.outputs` of a layer, by context-parallel ranks."""
    shard, d_out = context_parallel_shard(mesh, [x.detach(), x.detach().flip(1)], [1, 1])
    out = net(shard.requires_grad_())
    out.backward(d_out)
    whole = context_parallel_unshard(mesh, [out.detach(), shard.grad], [1, 1])  # type: ignore[list-item]
    values = dict(zip(("out", "dx"), whole, strict=True))
    for name, p in net.named_parameters():
        if p.grad is not None:
            gradient = p.grad.float()
            dist.all_reduce(gradient)
            values[f"d{name}"] = gradient.to(p.dtype)
    return values


def check_layer(form: str, quick: bool, device: torch.device) -> Row:
    """The largest error of a context-parallel layer as a share of its budget."""
    T = 256 if quick else CHECKED
    net = make_layer(form, T, quick, device)
    net.dense_length = 0
    low = copy.deepcopy(net)
    low.backend = "eager"
    exact = copy.deepcopy(low).float()
    torch.manual_seed(1)
    x = torch.randn(1, T, net.config.dim, device=device, dtype=torch.bfloat16)
    subject = next(iter(clock.HEADS))
    right, eager = clock.outputs(subject, exact, x.float()), clock.outputs(subject, low, x)
    mesh = mesh_of("cp", device)
    got = sharded_outputs(context_parallel(net, mesh), x, mesh)  # type: ignore[arg-type]
    return {"error_share": clock.largest_share(right, got, eager)}


def measure_layer(form: str, mode: str, T: int, quick: bool, device: torch.device) -> Row:
    net, mesh = make_layer(form, T, quick, device), mesh_of(mode, device)
    if mode == "cp":
        context_parallel(net, mesh)
    x = torch.randn(1, T // mesh.size(), net.config.dim, device=device, dtype=torch.bfloat16)
    both, forward = clock.calls_of(next(iter(clock.HEADS)), net, x)
    reset_peak(device)
    row = {
        "both_ms": median_ms(both, device), "forward_ms": median_ms(forward, device),
        "peak_mib": peak_mib(device),
    }  # fmt: skip
    return row | (count_sent(both) if device.type == "cpu" else {})


# models


def make_step(form: str, mode: str, T: int, rows: int, quick: bool, device: torch.device) -> Any:
    """A training step of a model, which returns the mean loss of `rows` rows of T tokens."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {**MODEL, **(SMALL if quick else {})}
    settings = dict(use_sparse_attn=True, sparse_attn_kwargs=settings_of(form, T))
    with device:
        net: Any = Transformer(**sizes | settings)
    mesh = mesh_of(mode, device)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    parallelize(net, mesh, activation_checkpointing=True, mp_policy=policy)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-4)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, 256, (rows, T + 1), generator=generator).to(device)
    ids, labels = tokens[:, :-1], tokens[:, 1:]
    if mode == "cp":
        ids, labels = context_parallel_shard(mesh, [ids, labels], [1, 1])
    elif mode == "dp":
        ids, labels = (t.chunk(mesh.size())[mesh.get_local_rank()] for t in (ids, labels))

    def step() -> Tensor:
        loss = F.cross_entropy(net(ids).flatten(0, 1).float(), labels.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def check_model(form: str, quick: bool, device: torch.device) -> Row:
    """Losses of three steps, of all modes on the same rows. Raises WrongResult."""
    losses, T = {}, 256 if quick else CHECKED
    for mode in MODES:
        step = make_step(form, mode, T, dist.get_world_size(), quick, device)
        steps = torch.stack([step() for _ in range(3)])
        dist.all_reduce(steps)
        losses[mode] = steps / dist.get_world_size()
        error = (losses[mode] - losses["one"]).abs().max().item()
        if not error <= LOSS_TOLERANCE:
            raise WrongResult(f"losses of {mode} differ by {error:.2e} from those of one process")
    return {}


def measure_model(form: str, mode: str, T: int, quick: bool, device: torch.device) -> Row:
    rows = dist.get_world_size() if mode == "dp" else 1
    step = make_step(form, mode, T, rows, quick, device)
    step()
    reset_peak(device)
    ms = median_ms(step, device)
    row = {"step_ms": ms, "tokens_per_s": round(rows * T / ms * 1e3), "peak_mib": peak_mib(device)}
    return row | (communication(step) if device.type == "cuda" else count_sent(step))


# clocks and traces


def median_ms(call: Callable[[], Any], device: torch.device) -> float:
    times, (warm, repeats) = [], (2, 5) if device.type == "cuda" else (1, 1)
    for _ in range(warm + repeats):
        dist.barrier()
        began = common.synchronize(device)
        call()
        times.append((common.synchronize(device) - began) * 1e3)
    return round(statistics.median(times[warm:]), 3)


def reset_peak(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def peak_mib(device: torch.device) -> int | None:
    """The largest of all ranks."""
    if device.type != "cuda":
        return None
    peak = torch.tensor(torch.cuda.max_memory_allocated(device), device=device)
    dist.all_reduce(peak, dist.ReduceOp.MAX)
    return round(int(peak) / 2**20)


class SentBytes(TorchDispatchMode):
    """Bytes that this rank sends, by the names of `scaling.sent_bytes`."""

    def __init__(self) -> None:
        super().__init__()
        self.sent = dict.fromkeys(COLLECTIVES.values(), 0)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        op = func.name().partition(".")[0]
        if name := COLLECTIVES.get(op):
            whole, shard = args[:2] if op.startswith("c10d") else (out, args[0])
            self.sent[name] += abs(whole.nbytes - shard.nbytes)
        return out


def count_sent(step: Callable[[], Any]) -> Row:
    with SentBytes() as counter:
        step()
    return {"sent_bytes": counter.sent}


def communication(step: Callable[[], Any]) -> Row:
    """Times of NCCL kernels in a step of this rank: all of it, and that beside no other kernel."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as profiler:
        step()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    nccl: Spans = []
    others: Spans = []
    for event in events:
        if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset"):
            span = float(event["ts"]), float(event["ts"]) + float(event["dur"])
            (nccl if "nccl" in event["name"].lower() else others).append(span)
    exposed = covered(nccl + others) - covered(others)
    return {"nccl_ms": round(covered(nccl) / 1e3, 3), "exposed_ms": round(exposed / 1e3, 3)}


def covered(spans: Spans) -> float:
    """The length of what intervals cover together."""
    length, reached = 0.0, -math.inf
    for begin, end in sorted(spans):
        length += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return length


# tables


def table_of(rows: Sequence[Row], subject: str) -> str:
    """Of the last row of each case."""
    some = [row for row in rows if row["subject"] == subject]
    alone = {(row["form"], row["T"]): row for row in some if row["mode"] == "one"}

    def cell(passes: dict[str, Row]) -> str:
        (row,) = passes.values()
        base = alone.get((row["form"], row["T"]), {})
        if subject == "layer":
            return f"{row['forward_ms']:.0f} / {row['both_ms'] - row['forward_ms']:.0f}"
        text = f"{row['step_ms'] / 1e3:.2f} s, {row['peak_mib'] / 1024:.0f} GiB"
        if row["mode"] != "one" and "tokens_per_s" in base:
            share = row["tokens_per_s"] / base["tokens_per_s"] / row["processes"]
            text += f", {share:.0%}, {row['exposed_ms']:.0f} ms"
        return text

    head = {"layer": "ms, forward / backward", "model": "step, memory, efficiency, exposed"}
    names = {"one": "1 GPU", "dp": "data parallel", "cp": "context parallel"}
    return common.grid(
        some, head[subject], lambda row: f"{row['form']}, {names[row['mode']]}",
        lambda row: row["T"], cell,
    )  # fmt: skip


TABLES = {
    PAGE: {f"distributed {name}": functools.partial(table_of, subject=name)
           for name in ("model", "layer")}
    | {"scaling": scaling.predictions, "scaling measured": scaling.comparison}
}  # fmt: skip


def options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--lengths", type=int, nargs="+", default=list(LENGTHS), help="of the model")
    add("--layer-length", type=int, default=LAYER_LENGTH)
    add("--subjects", nargs="+", choices=("model", "layer"), default=("model", "layer"))
    add("--forms", nargs="+", choices=FORMS, default=FORMS)
    add("--modes", nargs="+", choices=MODES, default=MODES)


def run(args: argparse.Namespace, recorder: common.Recorder) -> None:
    if int(os.environ.get("WORLD_SIZE", "1")) < 2:
        raise ValueError("it needs 2 processes or more: start torchrun --nproc-per-node 2")
    device = args.device
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    kind = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(kind, timeout=datetime.timedelta(minutes=10))
    if dist.get_rank():
        recorder.out, sys.stdout = None, open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    lengths, layer_length = args.lengths, args.layer_length
    if args.quick:
        lengths, layer_length = [256], 512
    known = {"run": time.strftime("%Y%m%dT%H%M%S"), "processes": dist.get_world_size()}
    place = args.quick, device
    for subject in args.subjects:
        is_layer = subject == "layer"
        check, measure = (check_layer, measure_layer) if is_layer else (check_model, measure_model)
        for form in (form for form in args.forms if is_layer or form in FORMS[:2]):
            checked = common.attempt(functools.partial(check, form, *place), device)
            for mode in (mode for mode in args.modes if not (is_layer and mode == "dp")):
                for T in [layer_length] if is_layer else lengths:
                    common.release()
                    call = functools.partial(measure, form, mode, T, *place)
                    row = checked if "failed" in checked else common.attempt(call, device)
                    head = {"subject": subject, "form": form, "mode": mode, "T": T}
                    recorder.add({**head, **checked, **row, **known})
    dist.barrier()
    dist.destroy_process_group()


FIELDS = ("subject", "form", "mode", "T")
# one GPU may lack the memory
BENCHMARK = common.Benchmark(
    "distributed", __doc__, options, run, FIELDS, TABLES, required=lambda row: row["mode"] != "one"
)
main = BENCHMARK.main

if __name__ == "__main__":
    main()
