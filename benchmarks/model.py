"""Wall time of a whole model against the length of a sequence: the chart of the README.

    python -m benchmarks.model              time every form at every length, append rows
    python -m benchmarks.model --table      redraw the chart and the table of docs/performance.md
    python -m benchmarks.model --quick      a small model, nothing recorded

A training step is the forward and backward pass of the loss of one sequence, a prefill a forward
without gradients; both eager, in bf16, by the clock. Dense attention is the model of one softmax
with `dense=True`: the same weights, and SDPA. Before a sparse form is timed, its logits are held
against its own weights in fp32 on the eager backend: at most twice the error of that backend in
bf16.
"""

from __future__ import annotations

import argparse
import copy
import functools
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from native_sparse_attention import Transformer, recipes
from native_sparse_attention.compress import MeanPool
from native_sparse_attention.presets import preset

from . import common, oracle
from .common import NO_ROWS, Row

PAGE = common.ROOT / "docs" / "performance.md"
PLOT = common.ROOT / "docs" / "images" / "model.png"

MODEL = dict(num_tokens=256, dim=2048, depth=4, heads=16, kv_heads=4, dim_head=128, causal=True)
QUICK = dict(MODEL, dim=64, depth=2, dim_head=16)
LENGTHS = (4096, 8192, 16384, 32768, 65536, 131072)
# tokens of the check, which eager PyTorch can run
CHECKED = 2048
PASSES = ("training step", "prefill")


def sparse(name: str, **settings: Any) -> Callable[[dict[str, Any], int], Transformer]:
    def make(model: dict[str, Any], T: int) -> Transformer:
        kwargs = preset(name, T, settings)
        return Transformer(**model, use_sparse_attn=True, sparse_attn_kwargs=kwargs)

    return make


def dense(model: dict[str, Any], T: int) -> Transformer:
    net = sparse("one-softmax", num_selected_blocks=0)(model, T)
    recipes.set_dense(net, True)
    return net


FORMS: dict[str, Callable[[dict[str, Any], int], Transformer]] = {
    "dense": dense,
    "one softmax": sparse("one-softmax"),
    "one softmax, ranked by means": sparse(
        "one-softmax", importance="logits", compress_block_size=32, compress_block_sliding_stride=16
    ),
    "three branches": sparse(
        "paper", importance="logits", branch_kv="shared", compress_mlp=MeanPool()
    ),
}


@torch.no_grad()
def check(net: Any, ids: Tensor) -> None:
    """Raises WrongResult where logits in bf16 err more than twice as much as on eager PyTorch."""
    twin = copy.deepcopy(net)
    for index, (attention, _) in enumerate(twin.layers):
        attention.backend = "eager"
        attention.dense_length = net.layers[index][0].dense_length = 0
    low = twin(ids)
    oracle.share_of_budget("logits", net(ids), twin.float()(ids).double(), low)


def measure(form: str, T: int, model: dict[str, Any], device: torch.device) -> Row:
    """Medians in ms of both passes, and the peak memory of a training step."""
    torch.manual_seed(0)
    net = FORMS[form](model, T).to(device, torch.bfloat16)
    ids = torch.randint(0, model["num_tokens"], (1, T + 1), device=device)

    def train() -> None:
        net(ids, return_loss=True).backward()
        net.zero_grad(set_to_none=True)

    def prefill() -> None:
        with torch.no_grad():
            net(ids[:, :-1])

    row: Row = {}
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    for name, call in zip(PASSES, (train, prefill), strict=True):
        times = []
        for _ in range(8):
            began = common.synchronize(device)
            call()
            times.append((common.synchronize(device) - began) * 1e3)
        row[name] = round(statistics.median(times[3:]), 3)
    if device.type == "cuda":
        row["peak_mib"] = round(torch.cuda.max_memory_allocated() / 2**20)
    return row


def table(rows: Sequence[Row]) -> str:
    """Milliseconds; brackets: times as fast as dense attention. Of the last run."""
    run = [row for row in rows if row["run"] == rows[-1]["run"]]
    dense = {row["T"]: row for row in run if row["form"] == "dense"}
    cells = [row | {"what": name} for name in PASSES for row in run]

    def cell(passes: dict[str, Row]) -> str:
        (row,) = passes.values()
        ms, base = row[row["what"]], dense.get(row["T"], {}).get(row["what"])
        ratio = f" ({base / ms:.2f})" if base and row["form"] != "dense" else ""
        return common.number(ms) + ratio

    return common.grid(
        cells, "ms (times as fast as dense)", lambda row: f"{row['what']}, {row['form']}",
        lambda row: row["T"], cell,
    ) if rows else NO_ROWS  # fmt: skip


TABLES = {PAGE: {"model": table}}


def plot(rows: Sequence[Row]) -> None:
    """ms against length, a panel for each pass, a line for each form."""
    run = [row for row in rows if row["run"] == rows[-1]["run"]]
    panels: dict[str, dict[str, dict[float, float]]] = {name: {} for name in PASSES}
    for row in run:
        for name in PASSES:
            if name in row:
                panels[name].setdefault(row["form"], {})[row["T"]] = row[name]
    common.chart(panels, PLOT, "tokens of the sequence", "ms")


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--lengths", type=int, nargs="+", default=list(LENGTHS))


def run(args: argparse.Namespace, recorder: common.Recorder) -> None:
    device, known = args.device, {"run": time.strftime("%Y%m%dT%H%M%S")}
    model, lengths = (QUICK, [256]) if args.quick else (MODEL, args.lengths)
    for form, make in FORMS.items():
        net = make(model, CHECKED).to(device, torch.bfloat16)
        if form != "dense":
            check(net, torch.randint(0, model["num_tokens"], (1, CHECKED), device=device))
        del net
        for T in lengths:
            common.release()
            row = common.attempt(functools.partial(measure, form, T, model, device), device)
            recorder.add({"form": form, "T": T, **row, **known})


BENCHMARK = common.Benchmark("model", __doc__, options, run, ("form", "T"), TABLES, plot)
main = BENCHMARK.main

if __name__ == "__main__":
    main()
