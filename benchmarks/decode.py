"""A step of decoding: native sparse attention over a cache against dense attention over it.

    python -m benchmarks.decode                  time every size, append rows
    python -m benchmarks.decode --table          redraw results/performance.md from the rows
    python -m benchmarks.decode --quick          small ones, nothing recorded

B rows hold S tokens each, the keys of T new ones among them; random q, k, v. "ours" is all of
`decode_attention`: ranking, three branches, gate. "dense" is `scaled_dot_product_attention` by
cuDNN over [B K S D], contiguous. The step is one CUDA graph; its replays are timed by CUDA events,
the L2 cache overwritten before each, outside graph and times.

No provider is timed before what its graph gave passed `oracle.py` in this process: whole at a small
length, some queries at the timed one. Which blocks ours selects is read off values that say which
block they are of, and held against the scores in fp64 (near ties may go either way); the output is
then held against fp64, for the same blocks.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from native_sparse_attention import decode_attention, select_blocks

from . import attention, common, oracle, problem
from .attention import BASELINE, CHECK_LENGTH, PAGE
from .attention import PLOT as PLOT_OF_ATTENTION
from .common import Row, WrongResult, number
from .oracle import Branch
from .problem import GROUP, Setting, Tensors
from .providers import ONE_SOFTMAX, Form, our_branches

STORED = ("k", "v", "ck", "cv")
CHECK_ROWS = 3


@dataclasses.dataclass(frozen=True)
class Step:
    """B rows of S tokens, the T newest of which ask; `setting.T` is S."""

    setting: Setting
    B: int
    T: int = 1

    @property
    def S(self) -> int:
        return self.setting.T

    @property
    def positions(self) -> range:
        return range(self.S - self.T, self.S)

    def row(self) -> Row:
        fields = self.setting.row()
        return {"B": self.B, "S": fields.pop("T"), "T": self.T, **fields}


# inputs


def draw(step: Step, device: torch.device, seed: int = 0) -> Tensors:
    """q [B T H D], branch_gates, and k, v [B S K D], their mean pooled ck, cv [B W K D] as views of
    storage [B K ...], as a cache has them."""
    c = step.setting
    generator = torch.Generator(device).manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device, dtype=c.dtype)

    x = {"q": normal(step.B, step.T, c.H, c.D)}
    x["branch_gates"] = normal(step.B, step.T, c.H, 3).sigmoid()
    for name in ("k", "v"):
        x[name] = normal(step.B, c.K, step.S, c.D).transpose(1, 2)
        x[f"c{name}"] = windows_of(x[name], step)
    x["lengths"] = torch.full((step.B,), step.S - step.T, dtype=torch.int32, device=device)
    return x


def windows_of(tokens: Tensor, step: Step) -> Tensor:
    """The mean pooled windows [B W K D] of tokens [B S K D], as a view of storage [B K ...]."""
    c = step.setting
    windows = tokens.new_empty(step.B, tokens.shape[2], step.S // c.d, c.D).transpose(1, 2)
    for row, sequence in zip(windows, tokens, strict=True):  # padding copies: a row at a time
        row.copy_(problem.pooled(sequence[None], c.l, c.d)[0])
    return windows


# providers


class Ours:
    """The whole of `decode_attention`."""

    factor = 2.0

    def __init__(self, name: str, importance: str) -> None:
        self.name, self.importance = name, importance

    def sized(self, step: Step) -> Step:
        """The step with the provider's own sizes."""
        return step

    def prepare(self, x: Tensors, step: Step) -> None:
        """Put what a call needs besides its inputs into x. Not timed."""

    def arguments(self, x: Tensors, step: Step) -> dict[str, Any]:
        """Keys and values as a cache has them, and what says how they are read."""
        stored = {name: x[name] for name in STORED}
        return {**stored, "branch_gates": x["branch_gates"], "sliding_window_size": step.setting.w}

    def call(self, x: Tensors, step: Step) -> Tensor:
        # by name: `auto` might time what it fell back to
        backend = "triton" if x["q"].is_cuda else "eager"
        given = self.arguments(x, step) | dict(importance=self.importance, backend=backend)
        return decode_attention(x["q"], lengths=x["lengths"], **given, **step.setting.ranking)

    def branches(self, step: Step) -> list[Branch]:
        return our_branches(step.setting)


class OneSoftmax(Ours):
    """The selected branch alone, as in `providers.OneSoftmax`."""

    def __init__(self, name: str, form: Form) -> None:
        super().__init__(name, form.importance)
        self.form = form

    def sized(self, step: Step) -> Step:
        return dataclasses.replace(step, setting=self.form.sized(step.setting))

    def prepare(self, x: Tensors, step: Step) -> None:
        c, keys = step.setting, x["k"]
        if self.form.index:  # a cache has the keys of one head, and a query for each head
            x["cq"] = torch.randn_like(x["q"][:, :, : c.K]).repeat_interleave(c.G, 2)
            keys = torch.randn_like(keys[:, :, :1].transpose(1, 2)).transpose(1, 2)
        keys = keys if c.l == 1 else windows_of(keys, step)
        x["ck"] = keys.expand(-1, -1, c.K, -1)
        if c.groups:  # those that an equal query at the begin of the tokens' group has kept
            x["q"] = x["q"][:, :1].expand(-1, step.T, -1, -1).contiguous()
            leader = step.positions[0] // (GROUP * c.s) * GROUP * c.s
            place = dict(importance=self.importance, q_offset=leader, seq_len=step.S)
            groups = select_blocks(x["q"][:, :1], x["ck"], **place, **c.of_groups.ranking)
            x["ranking"] = groups.transpose(1, 2).repeat(1, 1, step.T + 1, 1)

    def arguments(self, x: Tensors, step: Step) -> dict[str, Any]:
        stored = {name: x.get(name) for name in ("k", "v", "ck", "cq", "ranking")}
        absent = dict(cv=None, branch_gates=None, sliding_window_size=0)
        return {**stored, **absent, "branches": ("selected",)}

    def branches(self, step: Step) -> list[Branch]:
        c = step.setting
        return [oracle.chosen(c.s, c.n, c.initial, c.local)]


class Paged(Ours):
    """Of pages that lie anywhere."""

    def prepare(self, x: Tensors, step: Step) -> None:
        size = next(size for size in (4 * step.setting.s, step.setting.s) if step.S % size == 0)
        device, pages = x["q"].device, step.B * (step.S // size)
        generator = torch.Generator(device).manual_seed(0)
        order = torch.randperm(pages, generator=generator, device=device, dtype=torch.int32)
        x["page_table"] = order.view(step.B, -1)
        x |= {f"pages of {name}": self.paged(x[name], x["page_table"]) for name in STORED}
        x["v in pages"] = x["v"]

    def arguments(self, x: Tensors, step: Step) -> dict[str, Any]:
        pages = {name: x[f"pages of {name}"] for name in STORED}
        if x["v"] is not x["v in pages"]:
            pages["v"] = self.paged(x["v"], x["page_table"])
        return super().arguments(x, step) | pages | {"page_table": x["page_table"]}

    @staticmethod
    def paged(t: Tensor, table: Tensor) -> Tensor:
        """Pages [pages, n, K, D], views of storage [pages, K, n, D], of rows [B, N, K, D]."""
        rows = t.unflatten(1, (table.shape[1], -1)).transpose(2, 3)
        pages = t.new_empty(table.numel(), *rows.shape[2:])
        pages[table.long()] = rows
        return pages.transpose(1, 2)


class Dense(Ours):
    """Attention to everything, by cuDNN, with heads that share keys as such."""

    importance, factor = "", 4.0

    def __init__(self, name: str) -> None:
        self.name = name

    def prepare(self, x: Tensors, step: Step) -> None:
        """For several tokens the mask, as it is added."""
        i = torch.tensor(step.positions, device=x["q"].device)
        hidden = torch.arange(step.S, device=i.device) > i[:, None]
        mask = hidden.new_zeros(hidden.shape, dtype=step.setting.dtype)
        x["mask"] = mask.masked_fill(hidden, -torch.inf)

    def call(self, x: Tensors, step: Step) -> Tensor:
        q, k, v = (x[name].transpose(1, 2) for name in ("q", "k", "v"))
        mask = x["mask"] if step.T > 1 else None
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION if q.is_cuda else SDPBackend.MATH):
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
        return out.transpose(1, 2)

    def branches(self, step: Step) -> list[Branch]:
        return [oracle.window(None)]


# the baseline first: others are compared with it
PROVIDERS: tuple[Ours, ...] = (
    Dense(BASELINE),
    Ours("ours", "logits"),
    Ours("ours-probs", "probs"),
    Paged("ours-paged", "logits"),
    *(OneSoftmax(name, form) for name, form in ONE_SOFTMAX.items()),
)


# checks


def selected(provider: Ours, x: Tensors, step: Step) -> Tensor:
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


def block_indices(chosen: Tensor, step: Step) -> Tensor:
    """Of [B T H c] the blocks of each group of heads, -1 behind them: [B T K n]."""
    chosen = chosen.unflatten(2, (step.setting.K, -1))
    if not (chosen == chosen[:, :, :, :1]).all():
        raise WrongResult("heads of a group attend different blocks")
    there, order = chosen[:, :, :, 0].int().sort(dim=-1, descending=True, stable=True)
    width = max(1, int(there.sum(-1).max()))
    return torch.where(there > 0, order, -1)[..., :width]


def as_prompt(x: Tensors, b: int, t: int, step: Step) -> Tensors:
    """One row and one of its queries, at every position: what `oracle.py` takes."""
    names = [n for n in ("q", "branch_gates", "cq") if n in x]
    queries = {n: x[n][b : b + 1, t : t + 1].expand(1, step.S, -1, -1) for n in names}
    return queries | {name: x[name][b : b + 1] for name in ("k", "v", "ck", "cv")}


def verify(
    provider: Ours, x: Tensors, step: Step, out: Tensor, queries: list[tuple[int, int]]
) -> float:
    """Hold queries (row, new token) to the definition; the largest error as a share of its budget.
    Raises WrongResult."""
    c, branches = step.setting, provider.branches(step)
    ranks = bool(provider.importance)
    blocks = block_indices(selected(provider, x, step), step) if ranks else None
    exact_parts, low_parts = list[Tensors](), list[Tensors]()
    for b, t in queries:
        one, i = as_prompt(x, b, t, step), torch.tensor([step.positions[t]], device=out.device)
        indices = None if blocks is None else blocks[b, t].expand(1, step.S, -1, -1)
        if indices is not None:
            oracle.check_ranking(c, provider.importance, one, indices, i)
        one.pop("cq", None)
        for results, dtype in ((exact_parts, torch.float64), (low_parts, c.dtype)):
            results.append(oracle.compute(branches, one, (), i, indices, dtype))
    got = torch.stack([out[b, t] for b, t in queries])
    sizes = {"v": got, "d_out": got}  # of gradients, which there are none of here
    exact, low = oracle.joined(exact_parts), oracle.joined(low_parts)
    return oracle.check_values({"out": got}, sizes, exact, low, provider.factor)


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


def check(provider: Ours, step: Step, device: torch.device) -> None:
    """All queries of a small step. Raises WrongResult."""
    x = draw(step, device)
    provider.prepare(x, step)
    _, out = captured(lambda: provider.call(x, step), device)
    verify(provider, x, step, out, [(b, t) for b in range(step.B) for t in range(step.T)])


def measure(provider: Ours, x: Tensors, step: Step, seconds: float, device: torch.device) -> Row:
    provider.prepare(x, step)
    replay, out = captured(lambda: provider.call(x, step), device)
    queries = sorted({(b, t) for b in (0, step.B - 1) for t in (0, step.T - 1)})
    share = verify(provider, x, step, out, queries)
    time = common.time_call(replay, seconds, device, clean=True)
    us = {f"{name}_us": round(1e3 * time[f"{name}_ms"], 2) for name in ("p20", "p50", "p80")}
    return {**us, "repeats": time["repeats"], "error_share": round(share, 3)}


# tables


def title(row: Row) -> str:
    return "{gpu}, B={B}, H={H}, K={K}, T={T}".format(**row)


def cell(passes: dict[str, Row]) -> str:
    (row,) = passes.values()
    speedup = number(row.get("speedup_over_cudnn"))
    return f"{number(row.get('p50_us'))} ({speedup})"


def table(rows: Sequence[Row]) -> str:
    """Microseconds, and the speed-up over dense cuDNN."""
    timed = [row for row in rows if "p50_us" in row or "failed" in row]
    head = "µs (times as fast as dense cuDNN)"
    return common.grid(timed, head, lambda row: row["provider"], lambda row: row["S"], cell, title)


TABLES = {PAGE: {"decode": table}}
PLOT = PLOT_OF_ATTENTION.with_name("decode.png")
PLOTTED = (BASELINE, "ours", "ours-paged", "one-softmax-max")


def plot(rows: Sequence[Row]) -> None:
    """Microseconds against the length of the cache, a panel for each B."""
    panels: dict[str, dict[str, dict[float, float]]] = {}
    for row in rows:
        if (row["H"], row["K"], row["T"]) == (64, 4, 1) and row["provider"] in PLOTTED:
            curves = panels.setdefault(f"B={row['B']}", {})
            if "p50_us" in row:
                curves.setdefault(row["provider"], {})[row["S"]] = row["p50_us"]
    common.chart(dict(sorted(panels.items())), PLOT, "tokens in the cache", "µs", columns=3)


# the program


def options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    names = [provider.name for provider in PROVIDERS]
    add("--lengths", type=int, nargs="+", default=[2**e for e in range(12, 19)], metavar="S")
    add("--batches", type=int, nargs="+", default=[1, 16, 64], metavar="B")
    add("--new", type=int, nargs="+", default=[1], metavar="T", help="new tokens of a step")
    add("--heads", nargs="+", default=["64/4"], metavar="H/K")
    add("--providers", nargs="+", choices=names, default=names)


def steps_of(args: argparse.Namespace) -> list[Step]:
    cuda = args.device.type == "cuda"
    lengths, batches, shapes = args.lengths, args.batches, args.heads
    if args.quick:
        lengths, batches = ([4096, 16384], [1, 16]) if cuda else ([320], [3])
        shapes = shapes if cuda else ["4/2"]
    steps = []
    for heads in shapes:
        H, K = map(int, heads.split("/"))
        for S in lengths:
            setting = Setting(S, H, K) if cuda else attention.tiny(S, H, K)
            if S % setting.s:
                raise ValueError(f"lengths must be multiples of {setting.s}, got {S}")
            steps += [Step(setting, B, T) for B in batches for T in args.new]
    return steps


@torch.no_grad()
def run(args: argparse.Namespace, recorder: common.Recorder) -> None:
    device, passed = args.device, set[Any]()
    seconds = min(args.seconds, 0.05) if args.quick else args.seconds
    for step in steps_of(args):
        baseline = None
        for provider in PROVIDERS:
            if provider.name not in args.providers:
                continue
            sized = provider.sized(step)
            key = (provider.name, small(sized))

            def timed(provider: Ours = provider, sized: Step = sized, key: Any = key) -> Row:
                if key not in passed:
                    check(provider, small(sized), device)
                    passed.add(key)
                return measure(provider, draw(sized, device), sized, seconds, device)

            row = common.attempt(timed, device)
            common.release()
            p50 = row.get("p50_us")
            baseline = p50 if provider.name == BASELINE else baseline
            if baseline and p50:
                row["speedup_over_cudnn"] = round(baseline / p50, 3)
            recorder.add({"provider": provider.name, **sized.row(), **row})


BENCHMARK = common.Benchmark(
    "decode", __doc__, options, run, ("provider", "B", "S", "T", "H", "K"), TABLES, plot,
    required=attention.is_ours, seconds=0.3,
)  # fmt: skip
main = BENCHMARK.main

if __name__ == "__main__":
    main()
