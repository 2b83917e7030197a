"""Native sparse attention against dense attention and against what others published.

    python -m benchmarks.attention                   everything; better a length or two at a time:
    python -m benchmarks.attention --lengths 8192 --heads 64/4 --strides 1 4
    python -m benchmarks.attention --table           redraw results/performance.md from the rows
    python -m benchmarks.attention --quick           few sizes; on a CPU tiny ones, in seconds

One row of tokens, causal, random q, k, v. "ours" is all of `native_sparse_attention` after
compression; ck, cv are the mean pooled windows of k, v, made outside the timing. The forward pass
is timed as training runs it, its graph recorded; the backward pass alone, on a kept graph. Times
are by CUDA events, the L2 cache overwritten before each call, and the GPU kept waiting until the
call is launched: the GPU's work, not Python's. Peak memory is that of one forward and backward pass
with inputs and gradients, over what was allocated before the inputs.

No provider is timed before it passed `oracle.py` in this process: at a small length whole, at the
timed length by some queries. One that fails, or cannot run, leaves a row that says why.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
import torch._dynamo
import torch._functorch.config
from torch import Tensor

from . import common, oracle, problem
from .common import PASSES, Row, both
from .problem import Setting, Tensors
from .providers import Provider, providers

PAGE = common.RESULTS / "performance.md"
PLOT = common.ROOT / "docs" / "images" / "attention.png"
PLOTTED = ("dense-cudnn", "ours", "one-softmax", "fla")
CHECK_LENGTH = 2048
SPOT_ROWS = 64
BASELINE = "dense-cudnn"


# one provider


def prepared(provider: Provider, setting: Setting, device: torch.device) -> Tensors:
    x = problem.draw(setting, (*provider.names, "d_out"), device)
    for name in provider.names:
        x[name].requires_grad_()
    provider.prepare(x, setting)
    return x


def backward(provider: Provider, x: Tensors, out: Tensor) -> tuple[Tensor, ...]:
    leaves = [x[name] for name in provider.names]
    return torch.autograd.grad(out, leaves, x["d_out"], retain_graph=True)


def verify(provider: Provider, x: Tensors, setting: Setting, rows: Tensor | None) -> float:
    """Hold the provider to its definition: all of it, or some rows and the laws. Returns the
    largest error as a share of its budget. Raises WrongResult."""
    every = torch.arange(setting.T, device=x["q"].device)
    picked = every if rows is None else rows
    indices = provider.indices(x, setting)
    if provider.importance is not None and indices is not None:
        oracle.check_ranking(setting, provider.importance, x, indices, picked)
    inputs = {name: x[name].detach() for name in (*provider.names, "d_out")}
    out = provider.call(x, setting)
    grads = dict(zip(provider.names, backward(provider, x, out), strict=True))
    branches = provider.branches(setting)
    names = provider.names
    if rows is not None:
        names = tuple(name for name in names if name in oracle.OF_QUERIES)
        oracle.check_laws(branches, inputs, {f"d{name}": grad for name, grad in grads.items()})
    actual = {"out": out.detach()[0, picked]}
    for name in names:
        grad = grads[name][0]
        actual[f"d{name}"] = grad[picked] if name in oracle.OF_QUERIES else grad
    # few queries at a time: their scores against all keys are in fp64
    chunks = picked.split(len(picked) if rows is None else 16)
    exact, low = (
        oracle.joined(
            [oracle.compute(branches, inputs, names, chunk, indices, dtype) for chunk in chunks]
        )
        for dtype in (torch.float64, setting.dtype)
    )
    return oracle.check_values(actual, inputs, exact, low, provider.factor)


def spot_rows(T: int, device: torch.device) -> Tensor:
    """Some queries, the first and the last among them."""
    generator = torch.Generator().manual_seed(T)
    rows = torch.randint(T, (min(SPOT_ROWS, T),), generator=generator)
    rows[0], rows[-1] = 0, T - 1
    return rows.unique().to(device)


def measure(
    provider: Provider, setting: Setting, seconds: float, device: torch.device
) -> list[Row]:
    """A row for the forward and one for the backward pass; of a provider that has passed."""
    cuda = device.type == "cuda"
    before = torch.cuda.memory_allocated(device) if cuda else 0
    x = prepared(provider, setting, device)
    share = verify(provider, x, setting, spot_rows(setting.T, device))
    common.release()
    peak = None
    if cuda:
        torch.cuda.reset_peak_memory_stats()
        out = provider.call(x, setting)
        torch.autograd.grad(out, [x[name] for name in provider.names], x["d_out"])
        peak = round((torch.cuda.max_memory_allocated() - before) / 2**20, 1)
        del out

    times = [common.time_call(lambda: provider.call(x, setting), seconds, device)]
    out = provider.call(x, setting)
    times.append(common.time_call(lambda: backward(provider, x, out), seconds, device))
    found = {"peak_mib": peak, "error_share": round(share, 3)}
    return [{"pass": name, **time, **found} for name, time in zip(PASSES, times, strict=True)]


def rows_of(
    provider: Provider, setting: Setting, small: Setting, passed: set[Any], args: argparse.Namespace
) -> list[Row]:
    """Rows of the forward and the backward pass, or the one that says why there are none. At a
    small length a provider is checked once; `passed` has those that were."""
    if (reason := provider.why_not(setting, args.device)) is not None:
        return [{"refused": reason}]
    rows: list[Row] = []

    def check_and_measure() -> Row:
        if (provider, small) not in passed:
            verify(provider, prepared(provider, small, args.device), small, None)
            passed.add((provider, small))
        rows.extend(measure(provider, setting, args.seconds, args.device))
        return {}

    failed = common.attempt(check_and_measure, args.device)
    common.release()
    return [failed] if failed else rows


def ratios(row: Row, times: dict[Any, float]) -> Row:
    """How a row compares with those before it, whose times in ms are added to `times`."""
    if "p50_ms" not in row:
        return {}
    at, ms = tuple(row[name] for name in ("T", "H", "K", "pass")), row["p50_ms"]
    times.setdefault((*at, row["provider"]), ms)
    found: Row = {}
    if dense := times.get((*at, BASELINE)):
        found["speedup_over_cudnn"] = round(dense / ms, 3)
    if not is_ours(row) and (ours := times.get((*at, "ours"))):
        found["times_ours"] = round(ms / ours, 3)
    return found


def is_ours(row: Row) -> bool:
    return row["provider"].startswith(("ours", "one-softmax"))


# tables and plot


def title(row: Row) -> str:
    heads = f"H={row['H']}, K={row['K']}" + (f", D={row['D']}" if row.get("D", 128) != 128 else "")
    return f"{row['gpu']}, {heads}"


def label(row: Row) -> str:
    name = row["provider"] if row["part"] == "whole" else f"{row['part']}, {row['provider']}"
    name += f", stride {row['selection_stride']}" if row["selection_stride"] > 1 else ""
    return f"{name}, {row['alike']} alike" if "alike" in row else name


def grid(rows: Sequence[Row], head: str, cell: Any) -> str:
    timed = [row for row in rows if "refused" not in row]
    return common.grid(timed, head, label, lambda row: row["T"], cell, title)


def table_of_speedups(rows: Sequence[Row]) -> str:
    whole = [row for row in rows if row["part"] == "whole"]
    head = "forward / backward, times as fast as dense cuDNN"
    return grid(whole, head, lambda passes: both(passes, "speedup_over_cudnn"))


def table_of_times(rows: Sequence[Row]) -> str:
    return grid(rows, "forward / backward, ms", lambda passes: both(passes, "p50_ms"))


def table_of_memory(rows: Sequence[Row]) -> str:
    whole = [row for row in rows if row["part"] == "whole"]

    def cell(passes: dict[str, Row]) -> str:
        return common.number(passes.get("forward", {}).get("peak_mib"))

    return grid(whole, "MiB of both passes", cell)


TABLES = {PAGE: {"speedups": table_of_speedups, "times": table_of_times, "memory": table_of_memory}}


def plot(rows: Sequence[Row]) -> None:
    """ms against T: a panel for each (H, K) and pass, on the GPU of the most rows."""
    ((gpu, _),) = Counter(row["gpu"] for row in rows).most_common(1)
    panels: dict[str, dict[str, dict[float, float]]] = {}
    for (H, K), name in itertools.product(((64, 4), (32, 8)), PASSES):
        curves = panels.setdefault(f"{name}, H={H}, K={K}", {provider: {} for provider in PLOTTED})
        for row in rows:
            case = (gpu, H, K, "whole", 1, name)
            fields = ("gpu", "H", "K", "part", "selection_stride", "pass")
            if row["provider"] in curves and tuple(map(row.get, fields)) == case:
                curves[row["provider"]][row["T"]] = row["p50_ms"]
    drawn = {t: {n: points for n, points in c.items() if points} for t, c in panels.items()}
    common.chart(drawn, PLOT, "tokens", "ms")


# the program


def tiny(T: int, H: int, K: int) -> Setting:
    """Every branch and every rule in a problem that a CPU does at once."""
    sizes = dict(D=16, l=8, d=4, s=16, n=3, initial=1, local=2, w=31)
    return Setting(T, H, K, dtype=torch.float32, **sizes)


def options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    lengths = [2**e for e in range(10, 18)]
    add("--lengths", type=int, nargs="+", default=lengths, metavar="T", help="1k to 128k")
    add("--heads", nargs="+", default=["64/4", "32/8", "32/32"], metavar="H/K")
    add("--head-dim", type=int, default=128, metavar="D")
    add("--strides", type=int, nargs="+", default=[1, 4, 16], help="selection_stride of ours")
    add("--providers", nargs="*", choices=[*providers()], help="all by default")


def providers_of(args: argparse.Namespace) -> list[Provider]:
    """The baseline first: others are compared with it."""
    known, names = providers(), args.providers
    if names is None:
        names = [name for name in known if args.device.type == "cpu" or name != "dense-sdpa"]
    return [known[name] for name in known if name in names]


def settings_of(args: argparse.Namespace) -> list[Setting]:
    cuda = args.device.type == "cuda"
    if args.quick:
        return [Setting(2048), Setting(8192)] if cuda else [tiny(192, 4, 2)]
    heads = [map(int, heads.split("/")) for heads in args.heads]
    return [
        Setting(T, H, K, args.head_dim) if cuda else tiny(T, H, K)
        for H, K in heads
        for T in args.lengths
    ]


def run(args: argparse.Namespace, recorder: common.Recorder) -> None:
    check_length = CHECK_LENGTH
    if args.quick:
        args.seconds, args.strides = min(args.seconds, 0.05), [1, 4]
        check_length = CHECK_LENGTH if args.device.type == "cuda" else 96
    # a kept graph runs backward again and again
    torch._functorch.config.donated_buffer = False
    torch._dynamo.config.recompile_limit = 64
    passed, times, chosen = set[Any](), dict[Any, float](), providers_of(args)
    for setting in settings_of(args):
        for provider in chosen:
            for stride in args.strides if provider.strided else (1,):
                if setting.s % stride:
                    continue
                sized = dataclasses.replace(provider.sized(setting), stride=stride)
                small = dataclasses.replace(sized, T=min(sized.T, check_length))
                for row in rows_of(provider, sized, small, passed, args):
                    row = {"provider": provider.name, "part": "whole", **sized.row(), **row}
                    recorder.add({**row, **ratios(row, times)})


FIELDS = ("provider", "T", "H", "K", "selection_stride", "pass")
BENCHMARK = common.Benchmark(
    "attention", __doc__, options, run, FIELDS, TABLES, plot, required=is_ours, seconds=0.3
)
main = BENCHMARK.main

if __name__ == "__main__":
    main()
