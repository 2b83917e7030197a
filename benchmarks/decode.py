"""A step of decoding: native sparse attention over a cache against dense attention over it.

    python -m benchmarks.decode                  time every size, append rows
    python -m benchmarks.decode --sampling       tokens a second of sampling: `generate.py`
    python -m benchmarks.decode --table          redraw tables and plot of docs/performance.md
    python -m benchmarks.decode --quick          small ones, nothing recorded

B rows hold S tokens each, the keys of T new ones among them; random q, k, v. "ours" is all of
`decode_attention`: ranking, three branches, gate. "dense" is `scaled_dot_product_attention` as one
decodes with it at its best: the query heads of a KV head are rows of queries over [B K S D],
contiguous. The step is one CUDA graph; its replays are timed by CUDA events, the L2 cache
overwritten before each, outside graph and times.

No provider is timed before what its graph gave passed `oracle.py` in this process: whole at a small
length, some queries at the timed one. Which blocks ours selects is read off values that say which
block they are of, and held against the scores in fp64 (near ties may go either way); the output is
then held against fp64, for the same blocks.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from . import attention, common, decode_report, oracle, sampling
from .common import Row
from .decode_step import BASELINE, PROVIDERS, Provider, Step, draw, memory
from .oracle import Branch, WrongResult
from .problem import Setting, Tensors

RESULTS = common.RESULTS / "decode.jsonl"
CHECK_LENGTH = 2048
CHECK_ROWS = 3


# checks


def selected(provider: Provider, x: Tensors, step: Step) -> Tensor:
    """Which blocks each query attends that are not forced, [B T H c]. Values that are 1 in the
    dimension of their block make the selected branch's output each block's share of its softmax."""
    c, values, shares = step.setting, torch.zeros_like(x["v"]), []
    gates = torch.zeros_like(x["branch_gates"])
    gates[..., 1] = 1
    block = torch.arange(step.S // c.s, device=values.device)
    for some in block.split(c.D):
        first, end = int(some[0]) * c.s, int(some[-1] + 1) * c.s
        codes = torch.eye(len(some), c.D, device=values.device).repeat_interleave(c.s, 0)
        values.zero_()[:, first:end] = codes[:, None].to(values)
        out = provider.call({**x, "v": values, "branch_gates": gates}, step)
        shares.append(out[..., : len(some)] != 0)
    own = torch.tensor(step.positions, device=values.device)[:, None] // c.s
    forced = (block < c.initial) | ((block > own - c.local) & (block <= own))
    return torch.cat(shares, -1) & ~forced[:, None]


def lists(chosen: Tensor, step: Step) -> Tensor:
    """Of [B T H c] the blocks of each group of heads, -1 behind them: [B T K n]."""
    chosen = chosen.unflatten(2, (step.setting.K, -1))
    if not (chosen == chosen[:, :, :, :1]).all():
        raise WrongResult("heads of a group attend different blocks")
    there, order = chosen[:, :, :, 0].int().sort(dim=-1, descending=True, stable=True)
    width = max(1, int(there.sum(-1).max()))
    return torch.where(there > 0, order, -1)[..., :width]


def as_prompt(x: Tensors, b: int, t: int, step: Step) -> Tensors:
    """One row and one of its queries, at every position: what `oracle.py` takes."""
    names = [n for n in (*oracle.OF_QUERIES[:2], "cq") if n in x]
    queries = {n: x[n][b : b + 1, t : t + 1].expand(1, step.S, -1, -1) for n in names}
    return queries | {name: x[name][b : b + 1] for name in ("k", "v", "ck", "cv")}


def by_definition(
    branches: list[Branch], x: Tensors, i: Tensor, blocks: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """The output [1 H D] of the query at position i."""
    names = {name for branch in branches for name in (branch.keys, branch.values)}
    heads = []
    for h in range(x["k"].shape[2]):
        share = {n: x[n] for n in ("q", "branch_gates", *sorted(names))}
        share = {n: t.to(dtype) for n, t in oracle.of_head(share, h, i).items()}
        own = None if blocks is None else blocks[h][None]
        heads.append(oracle.definition(branches, share, i, own))
    return torch.cat(heads, 1)


def verify(
    provider: Provider, x: Tensors, step: Step, out: Tensor, queries: list[tuple[int, int]]
) -> float:
    """Hold queries (row, new token) to the definition; the largest error as a share of its budget.

    Raises:
        oracle.WrongResult
    """
    c, branches = step.setting, provider.branches(step)
    blocks = lists(selected(provider, x, step), step) if provider.importance else None
    exact, low = [], []
    for b, t in queries:
        one, i = as_prompt(x, b, t, step), torch.tensor([step.positions[t]], device=out.device)
        own = None if blocks is None else blocks[b, t]
        if provider.importance is not None and own is not None:
            everywhere = own.expand(1, step.S, -1, -1)
            oracle.check_ranking(c, provider.importance, one, everywhere, i)
        exact.append(by_definition(branches, one, i, own, torch.float64))
        low.append(by_definition(branches, one, i, own, c.dtype))
    got = torch.stack([out[b, t] for b, t in queries])
    sizes = {"v": got, "d_out": got}  # of gradients, which there are none of here
    exact_out, low_out = ({"out": torch.cat(part)} for part in (exact, low))
    return oracle.check_values({"out": got}, sizes, exact_out, low_out, provider.factor)


# timing


def captured(call: Callable[[], Tensor], device: torch.device) -> tuple[Callable[[], Any], Tensor]:
    """The call as one CUDA graph, to be replayed, and the output that a replay wrote; on a CPU the
    call itself."""
    if device.type != "cuda":
        return call, call()
    side = torch.cuda.Stream(device)
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):
        for _ in range(3):
            call()
    torch.cuda.current_stream(device).wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call()
    out.fill_(torch.nan)
    graph.replay()
    return graph.replay, out


def small(step: Step) -> Step:
    """A few rows, at the length where all queries are checked."""
    setting = dataclasses.replace(step.setting, T=min(step.S, CHECK_LENGTH))
    return Step(setting, min(step.B, CHECK_ROWS), step.T)


def check(provider: Provider, step: Step, device: torch.device) -> None:
    """All queries of a small step.

    Raises:
        oracle.WrongResult
    """
    x = draw(step, device)
    provider.prepare(x, step)
    _, out = captured(lambda: provider.call(x, step), device)
    verify(provider, x, step, out, [(b, t) for b in range(step.B) for t in range(step.T)])


def measure(
    provider: Provider, x: Tensors, step: Step, seconds: float, device: torch.device
) -> Row:
    provider.prepare(x, step)
    replay, out = captured(lambda: provider.call(x, step), device)
    queries = sorted({(b, t) for b in (0, step.B - 1) for t in (0, step.T - 1)})
    share = verify(provider, x, step, out, queries)
    time = common.time_call(replay, seconds, device, clean=True)
    us = {f"{name}_us": round(1e3 * time[f"{name}_ms"], 2) for name in ("p20", "p50", "p80")}
    read = provider.bytes(step)
    gbps = float(f"{read / us['p50_us'] / 1e3:.3g}")
    counts = {"repeats": time["repeats"], "bytes": read, "gbps": gbps}
    return {**us, **counts, "error_share": round(share, 3)}


def one(
    provider: Provider,
    x: Tensors,
    step: Step,
    passed: set[Any],
    seconds: float,
    device: torch.device,
) -> Row:
    """A provider's times, or why there are none; `passed` are the small checks behind it."""
    reason = provider.why_not(step, device)
    try:
        if reason is None:
            if (provider.name, small(step)) not in passed:
                check(provider, small(step), device)
                passed.add((provider.name, small(step)))
            return measure(provider, x, step, seconds, device)
    except WrongResult as error:
        reason = f"wrong: {error}"
    except Exception as error:  # a provider that fails leaves a row with its reason
        if not common.still_alive(device):
            raise
        reason = common.why(error)
    return {"failed": reason}


def no_room(step: Step, device: torch.device) -> str | None:
    if device.type != "cuda":
        return None
    free, need = torch.cuda.mem_get_info(device)[0], memory(step)
    return None if need <= free else f"needs {need / 2**30:.0f} GiB, {free / 2**30:.0f} are free"


@torch.no_grad()
def run(
    steps: list[Step],
    providers: list[Provider],
    out: Path | None,
    seconds: float,
    device: torch.device,
) -> list[Row]:
    known, rows, passed = common.environment(device), [], set[Any]()
    for step in steps:
        common.release()
        if reason := no_room(step, device):
            print(f"B={step.B} S={step.S}: left out, {reason}", flush=True)
            continue
        x, baseline = draw(step, device), None
        for provider in providers:
            own = provider.sized(step)
            row = one(provider, dict(x), own, passed, seconds, device)
            common.release()
            p50 = row.get("p50_us")
            baseline = p50 if provider.name == BASELINE else baseline
            if baseline and p50:
                row["speedup_over_cudnn"] = round(baseline / p50, 3)
            row = {"provider": provider.name, **own.row(), **row, **known}
            common.append_row(out, row)
            rows.append(row)
            print(line(row), flush=True)
        del x
    return rows


def line(row: Row) -> str:
    """A row as a person reads it."""
    head = f"{row['provider']:12} B={row['B']:<3} S={row['S']:<7} T={row['T']:<2}"
    head += f" {row['H']}/{row['K']}"
    if "failed" in row:
        return f"{head} {row['failed']}"
    text = f"{head} {row['p50_us']:10.1f} us {row['gbps']:7.0f} GB/s"
    return text + (f" {row['speedup_over_cudnn']:6.2f} x" if "speedup_over_cudnn" in row else "")


# the command line


def arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="benchmarks.decode")
    add = parser.add_argument
    names = [provider.name for provider in PROVIDERS]
    add("--lengths", type=int, nargs="+", default=[2**e for e in range(12, 19)], metavar="S")
    add("--batches", type=int, nargs="+", default=[1, 16, 64], metavar="B")
    add("--new", type=int, nargs="+", default=[1], metavar="T", help="new tokens of a step")
    add("--heads", nargs="+", default=["64/4"], metavar="H/K")
    add("--providers", nargs="+", choices=names, default=names)
    add("--seconds", type=float, default=0.3, help="of timing for each row")
    add("--out", type=Path, help="JSONL; results/decode.jsonl or sampling.jsonl, none with --quick")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add("--sampling", action="store_true", help="tokens a second of whole texts instead")
    add("--table", action="store_true", help="redraw tables and plot from the rows there")
    add("--quick", action="store_true", help="small ones, nothing recorded")
    return parser.parse_args(argv)


def steps_of(args: argparse.Namespace) -> list[Step]:
    cuda = torch.device(args.device).type == "cuda"
    lengths, batches, shapes = args.lengths, args.batches, args.heads
    if args.quick:
        lengths, batches = ([4096, 16384], [1, 16]) if cuda else ([320], [1, 3])
        shapes = shapes if cuda else ["4/2"]
    steps = []
    for heads in shapes:
        H, K = (int(number) for number in heads.split("/"))
        for S in lengths:
            setting = Setting(S, H, K) if cuda else attention.tiny(S, H, K)
            if S % setting.s:
                raise SystemExit(f"--lengths must be multiples of {setting.s}, got {S}")
            steps += [Step(setting, B, T) for B in batches for T in args.new]
    return steps


def main(argv: list[str] | None = None) -> list[Row]:
    args = arguments(argv)
    device = torch.device(args.device)
    if args.table:
        rows = common.read_rows(args.out or RESULTS)
        decode_report.draw(rows, common.read_rows(sampling.RESULTS))
        return rows
    results = sampling.RESULTS if args.sampling else RESULTS
    out = args.out or (None if args.quick else results)
    if args.sampling:
        return sampling.run(args.quick, out, device)
    chosen = [provider for provider in PROVIDERS if provider.name in args.providers]
    seconds = min(args.seconds, 0.05) if args.quick else args.seconds
    rows = run(steps_of(args), chosen, out, seconds, device)
    ours = [row for row in rows if "failed" in row and row["provider"].startswith("ours")]
    if ours:
        raise SystemExit(f"ours not timed in {len(ours)} cases, the first: {line(ours[0])}")
    return rows


if __name__ == "__main__":
    main()
