"""Native sparse attention against dense attention and against what others published.

    python -m benchmarks.attention                   everything; better a length or two at a time:
    python -m benchmarks.attention --lengths 8192 --heads 64/4 --strides 1 4 --parts
    python -m benchmarks.attention --table           redraw results/performance.md from the rows
    python -m benchmarks.attention --quick           few sizes; on a CPU tiny ones, in seconds

One row of tokens, causal, random q, k, v. "ours" is all of `native_sparse_attention` after
compression; ck, cv are the mean pooled windows of k, v, made outside the timing. The forward pass
is timed as training runs it, its graph recorded; the backward pass alone, on a kept graph. Times
are by CUDA events, the L2 cache overwritten before each call, and the GPU kept waiting until the
call is launched: the GPU's work, not Python's. Peak memory is that of one forward and backward pass
with inputs and gradients, over what was allocated before the inputs. TFLOP/s counts the operations
of the definition (`problem.py`), GB/s each tensor of the call once.

No provider is timed before it passed `oracle.py` in this process: at a small length whole, at the
timed length by some queries. One that fails, or cannot run, leaves a row that says why.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
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


def verify(provider: Provider, x: Tensors, setting: Setting, rows: Tensor | None) -> float | None:
    """Hold the provider to its definition: all of it, or some rows and the laws. Returns the
    largest error as a share of its budget, None where there is only a ranking. Raises WrongResult.
    """
    every = torch.arange(setting.T, device=x["q"].device)
    picked = every if rows is None else rows
    indices = provider.indices(x, setting)
    if provider.importance is not None and indices is not None:
        oracle.check_ranking(setting, provider.importance, x, indices, picked)
    if not provider.differentiable:
        return None
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
) -> Iterator[Row]:
    """A row for the forward and one for the backward pass; the provider has passed at a small
    length."""
    cuda = device.type == "cuda"
    before = torch.cuda.memory_allocated(device) if cuda else 0
    x = prepared(provider, setting, device)
    share = verify(provider, x, setting, spot_rows(setting.T, device))
    common.release()
    peak = None
    if cuda:
        torch.cuda.reset_peak_memory_stats()
        out = provider.call(x, setting)
        if provider.differentiable:
            torch.autograd.grad(out, [x[name] for name in provider.names], x["d_out"])
        peak = round((torch.cuda.max_memory_allocated() - before) / 2**20, 1)
        del out

    times = [common.time_call(lambda: provider.call(x, setting), seconds, device)]
    flops = [float(provider.flops(setting))]
    inputs = [x[name] for name in provider.names]
    out = provider.call(x, setting)
    moved = [problem.nbytes(*inputs, x.get("indices"), out)]
    if provider.differentiable:
        times.append(common.time_call(lambda: backward(provider, x, out), seconds, device))
        counts = [branch.count for branch in provider.branches(setting)]
        flops.append(problem.BACKWARD * problem.attention_flops(setting, counts))
        # besides what the forward pass moves, d_out, and gradients as large as the inputs
        moved.append(moved[0] + problem.nbytes(x["d_out"], *inputs))
    for direction, time, operations, n in zip(PASSES, times, flops, moved, strict=False):
        ms = time["p50_ms"]
        yield {
            "pass": direction,
            **time,
            "tflops": float(f"{operations / ms / 1e9:.3g}"),
            "gbps": float(f"{n / ms / 1e6:.3g}"),
            "peak_mib": peak,
            "error_share": None if share is None else round(share, 3),
        }


class Timer:
    """Checks and times providers, each checked once at a small length."""

    def __init__(self, check_length: int, seconds: float, device: torch.device) -> None:
        self.check_length, self.seconds, self.device = check_length, seconds, device
        self.passed = set[tuple[Provider, Setting]]()

    def rows(self, provider: Provider, setting: Setting) -> list[Row]:
        """Rows of the forward and the backward pass, or the one that says why there are none."""
        if (reason := provider.why_not(setting, self.device)) is not None:
            return [{"refused": reason}]
        rows: list[Row] = []

        def check_and_measure() -> Row:
            small = dataclasses.replace(setting, T=min(setting.T, self.check_length))
            if (provider, small) not in self.passed:
                verify(provider, prepared(provider, small, self.device), small, None)
                self.passed.add((provider, small))
            rows.extend(measure(provider, setting, self.seconds, self.device))
            return {}

        failed = common.attempt(check_and_measure, self.device)
        common.release()
        return [failed] if failed else rows


def ratios(row: Row, times: dict[Any, float]) -> Row:
    """How a row compares with those before it, whose times in ms are added to `times`."""
    if "p50_ms" not in row:
        return {}
    at, ms = tuple(row[name] for name in ("T", "H", "K", "pass")), row["p50_ms"]
    times.setdefault((*at, row["provider"], row["part"]), ms)

    def base(provider: str, part: str) -> float | None:
        return times.get((*at, provider, part))

    found: Row = {}
    if row["part"] == "whole" and (dense := base(BASELINE, "whole")):
        found["speedup_over_cudnn"] = round(dense / ms, 3)
    if not is_ours(row) and (ours := base("ours", row["part"])):
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
    names = [name for name in providers() if name != "parts"]
    lengths = [2**e for e in range(10, 18)]
    add("--lengths", type=int, nargs="+", default=lengths, metavar="T", help="1k to 128k")
    add("--heads", nargs="+", default=["64/4", "32/8", "32/32"], metavar="H/K")
    add("--head-dim", type=int, default=128, metavar="D")
    add("--strides", type=int, nargs="+", default=[1, 4, 16], help="selection_stride of ours")
    add("--providers", nargs="*", choices=names, help="all by default")
    add("--parts", action="store_true", help="the branches and the selection, each alone")


def providers_of(args: argparse.Namespace) -> list[Provider]:
    """The baseline first: others are compared with it."""
    known, names = providers(), args.providers
    if names is None:
        left_out = ("parts", "dense-sdpa") if args.device.type == "cuda" else ("parts",)
        names = [name for name in known if name not in left_out]
    names = [*names, "parts"] if args.parts else names
    return [provider for name in known if name in names for provider in known[name]]


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
    timer, times = Timer(check_length, args.seconds, args.device), dict[Any, float]()
    chosen = providers_of(args)
    for setting in settings_of(args):
        for provider in chosen:
            for stride in args.strides if provider.strided else (1,):
                if setting.s % stride:
                    continue
                sized = dataclasses.replace(provider.sized(setting), stride=stride)
                for row in timer.rows(provider, sized):
                    row = {**provider.head(), **sized.row(), **row}
                    recorder.add({**row, **ratios(row, times)})


BENCHMARK = common.Benchmark(
    "attention", __doc__, options, run, ("provider", "part", "T", "H", "K", "selection_stride",
    "pass"), TABLES, plot, required=is_ours, seconds=0.3,
)  # fmt: skip
main = BENCHMARK.main

if __name__ == "__main__":
    main()
