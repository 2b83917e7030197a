"""Native sparse attention against dense attention and against what others published.

    python -m benchmarks.attention                   everything; better a length or two at a time:
    python -m benchmarks.attention --lengths 8192 --heads 64/4 --strides 1 4 --parts --agreement 4
    python -m benchmarks.attention --table           redraw results/performance.md from the rows
    python -m benchmarks.attention --quick           few sizes; on a CPU tiny ones, in seconds
    python -m benchmarks.attention --peer fsa=PATH   a published kernel, from a checkout (peers.py)

One row of tokens, causal, random q, k, v. "ours" is all of `native_sparse_attention` after
compression; ck, cv are the mean pooled windows of k, v, made outside the timing. The forward pass
is timed as training runs it, its graph recorded; the backward pass alone, on a kept graph. Times
are by CUDA events, the L2 cache overwritten before each call, and the GPU kept waiting until the
call is launched: the GPU's work, not Python's. Peak memory is that of one forward and backward pass
with inputs and gradients, over what was allocated before the inputs. TFLOP/s counts the operations
of the definition (`problem.py`), GB/s each tensor of the call once.

No provider is timed before it passed `oracle.py` in this process: at a small length whole, at the
timed length by some queries. One that fails, or cannot run, leaves a row that says why. With --peer
the lengths are 8k and 64k by default, and ours is timed whole and by the parts that peers have.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch._dynamo
import torch._functorch.config
from torch import Tensor

from . import common, oracle, performance, problem
from .common import Row
from .peers import PEERS, Peer, checkout
from .performance import PASSES
from .problem import Setting, Tensors
from .providers import OursSelected, Provider, providers

RESULTS = common.RESULTS / "attention.jsonl"
CHECK_LENGTH = 2048
SPOT_ROWS = 64
BASELINE = "dense-cudnn"


@dataclasses.dataclass(frozen=True)
class Plan:
    """What is timed, and how long."""

    settings: tuple[Setting, ...]
    providers: tuple[Provider, ...]
    strides: tuple[int, ...]
    check_length: int = CHECK_LENGTH
    seconds: float = 0.3
    out: Path | None = None


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
    largest error as a share of its budget, None where there is only a ranking.

    Raises:
        oracle.WrongResult
    """
    every = torch.arange(setting.T, device=x["q"].device)
    indices = provider.indices(x, setting)
    if provider.importance is not None and indices is not None:
        oracle.check_ranking(
            setting, provider.importance, x, indices, every if rows is None else rows
        )
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
    picked = every if rows is None else rows
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


def peak_memory(provider: Provider, x: Tensors, setting: Setting, before: int) -> float:
    torch.cuda.reset_peak_memory_stats()
    out = provider.call(x, setting)
    if provider.differentiable:
        torch.autograd.grad(out, [x[name] for name in provider.names], x["d_out"])
    torch.cuda.synchronize()
    return round((torch.cuda.max_memory_allocated() - before) / 2**20, 1)


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
    peak = peak_memory(provider, x, setting, before) if cuda else None

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


# all of them


class Run:
    """Providers one after another: checks done, times of the baseline, rows written."""

    def __init__(self, plan: Plan, device: torch.device) -> None:
        self.plan, self.device = plan, device
        self.environment = common.environment(device)
        self.checked: dict[Any, str | None] = {}
        self.baseline: dict[Any, float] = {}
        self.independent: dict[Any, float] = {}
        self.ours: dict[Any, float] = {}
        self.rows: list[Row] = []

    def check(self, provider: Provider, setting: Setting) -> str | None:
        """Why the provider's results are wrong at the small length; None where they are right."""
        small = dataclasses.replace(setting, T=min(setting.T, self.plan.check_length))
        key = (id(provider), small)
        if key not in self.checked:
            try:
                verify(provider, prepared(provider, small, self.device), small, None)
                self.checked[key] = None
            except oracle.WrongResult as error:
                self.checked[key] = f"wrong at T={small.T}: {error}"
        return self.checked[key]

    def write(self, provider: Provider, setting: Setting, row: Row) -> None:
        case = setting.row()
        key = (setting.T, setting.H, setting.K, row.get("pass"))
        if provider.name == BASELINE and "p50_ms" in row:
            self.baseline[key] = row["p50_ms"]
        if provider.part == "whole" and key in self.baseline and "p50_ms" in row:
            row["speedup_over_cudnn"] = round(self.baseline[key] / row["p50_ms"], 3)
        if provider.name == "ours" and setting.stride == 1 and "p50_ms" in row:
            self.ours.setdefault((*key, provider.part), row["p50_ms"])
        if isinstance(provider, Peer) and "p50_ms" in row:
            ours = self.ours.get((*key, provider.part))
            if ours is not None:
                row["times_ours"] = round(row["p50_ms"] / ours, 3)
        head: Row = {"provider": provider.name, "part": provider.part}
        if isinstance(provider, OursSelected) and provider.alike is not None:
            head["alike"] = provider.alike
            if provider.alike == 1 and "p50_ms" in row:
                self.independent[key] = row["p50_ms"]
            elif key in self.independent and "p50_ms" in row:
                row["speedup_over_independent"] = round(self.independent[key] / row["p50_ms"], 3)
        if provider.note:
            row["note"] = provider.note
        row = {**head, **case, **row, **self.environment}
        common.append_row(self.plan.out, row)
        self.rows.append(row)
        print(line(row), flush=True)

    def one(self, provider: Provider, setting: Setting) -> None:
        reason, field = provider.why_not(setting, self.device), "failed"
        if reason is not None:
            field = provider.refusal
        try:
            reason = reason or self.check(provider, setting)
            if reason is None:
                for row in measure(provider, setting, self.plan.seconds, self.device):
                    self.write(provider, setting, row)
        except oracle.WrongResult as error:
            reason = f"wrong at T={setting.T}: {error}"
        except Exception as error:
            reason = common.why(error)
        if reason is not None:
            self.write(provider, setting, {field: reason})
        common.release()
        if not common.still_alive(self.device):
            raise SystemExit("the GPU takes no more work after this error: nothing else was timed")

    def all(self) -> list[Row]:
        for setting in self.plan.settings:
            for provider in self.plan.providers:
                for stride in self.plan.strides if provider.strided else (1,):
                    if setting.s % stride == 0:
                        own = provider.sized(setting)
                        self.one(provider, dataclasses.replace(own, stride=stride))
        return self.rows


def line(row: Row) -> str:
    """A row as a person reads it."""
    head = f"{row['provider']:12} {row['part']:10} T={row['T']:<7} {row['H']}/{row['K']:<3}"
    head += f" stride {row['selection_stride']:<2}"
    if "alike" in row:
        head += f" {row['alike']} alike"
    if "failed" in row or "refused" in row:
        return f"{head} {row.get('failed') or row['refused']}"
    text = f"{head} {row['pass']:8} {row['p50_ms']:10.3f} ms {row['tflops']:7.1f} TFLOP/s"
    if row["peak_mib"] is not None:
        text += f" {row['peak_mib']:9.0f} MiB"
    for speedup in ("speedup_over_cudnn", "speedup_over_independent"):
        if speedup in row:
            text += f" {row[speedup]:6.2f} x"
    if "times_ours" in row:
        text += f" {row['times_ours']:6.2f} times ours"
    return text


# the command line


def tiny(T: int, H: int, K: int) -> Setting:
    """Every branch and every rule in a problem that a CPU does at once."""
    sizes = dict(D=16, l=8, d=4, s=16, n=3, initial=1, local=2, w=31)
    return Setting(T, H, K, dtype=torch.float32, **sizes)


def arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = common.parser_of("attention", __doc__)
    add = parser.add_argument
    names = [name for name in providers() if name != "parts"]
    add("--lengths", type=int, nargs="+", metavar="T", help="1k to 128k; 8k and 64k with --peer")
    add("--heads", nargs="+", default=["64/4", "32/8", "32/32"], metavar="H/K")
    add("--head-dim", type=int, default=128, metavar="D")
    add("--strides", type=int, nargs="+", default=[1, 4, 16], help="selection_stride of ours")
    add("--providers", nargs="*", choices=names, help="all by default")
    add("--parts", action="store_true", help="the branches and the selection, each alone")
    add("--agreement", type=int, metavar="R", help="random selections, independent and R alike")
    known = f"published kernels from a checkout; NAME: {', '.join(PEERS)}"
    add("--peer", type=checkout, nargs="+", default=[], metavar="NAME=PATH", help=known)
    add("--block-size", type=int, default=64, metavar="S", help="tokens of a selected block")
    add("--check-length", type=int, default=CHECK_LENGTH, help="where all results are checked")
    args = parser.parse_args(argv)
    if args.block_size != 64 and args.out is None:
        parser.error("--block-size needs --out: the page is drawn from rows of blocks of 64")
    return args


def plan_of(args: argparse.Namespace) -> Plan:
    known, cuda = providers(), torch.device(args.device).type == "cuda"
    names = args.providers
    peers = [peer for some in args.peer for peer in some]
    if names is None and peers:
        names = ["dense-cudnn", "ours"]
    if names is None:
        names = [name for name in known if name not in ("parts", "dense-sdpa" if cuda else "")]
    # the baseline first: others are compared with it
    names = [name for name in known if name in names] + (["parts"] if args.parts else [])
    chosen = [provider for name in names for provider in known[name]]
    if peers and not args.parts:
        parts = {peer.part for peer in peers}
        chosen += [p for p in known["parts"] if p.name == "ours" and p.part in parts]
    chosen += peers
    if args.agreement:
        chosen += [OursSelected(alike) for alike in (1, args.agreement)]
    options: dict[str, Any] = dict(
        providers=tuple(chosen),
        seconds=args.seconds,
        check_length=args.check_length,
        out=common.out_of(args, RESULTS),
    )
    if args.quick:
        options["seconds"] = min(args.seconds, 0.05)
        if cuda:
            return Plan((Setting(2048), Setting(8192)), strides=(1, 4), **options)
        options["check_length"] = 96
        return Plan((tiny(192, 4, 2),), strides=(1, 4), **options)
    settings, lengths = [], args.lengths
    if lengths is None:
        lengths = [8192, 65536] if peers else [2**e for e in range(10, 18)]
    for heads in args.heads:
        H, K = (int(number) for number in heads.split("/"))
        settings += [
            Setting(T, H, K, args.head_dim, s=args.block_size) if cuda else tiny(T, H, K)
            for T in lengths
        ]
    return Plan(tuple(settings), strides=tuple(args.strides), **options)


def main(argv: list[str] | None = None) -> list[Row]:
    args = arguments(argv)
    if args.table:
        rows = common.read_rows(args.out or RESULTS)
        performance.draw(rows)
        return rows
    device = torch.device(args.device)
    # a kept graph runs backward again and again
    torch._functorch.config.donated_buffer = False
    torch._dynamo.config.recompile_limit = 64
    rows = Run(plan_of(args), device).all()
    ours = [row for row in rows if "failed" in row and row["provider"].startswith("ours")]
    if ours:
        raise SystemExit(f"ours not timed in {len(ours)} cases, the first: {line(ours[0])}")
    return rows


if __name__ == "__main__":
    main()
