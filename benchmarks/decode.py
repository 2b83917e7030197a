"""A step of decoding: native sparse attention over a cache against dense attention over it.

    python -m benchmarks.decode                  time every size, append rows
    python -m benchmarks.decode --table          redraw results/performance.md and plots
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
import functools
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from native_sparse_attention import decode_attention

from . import attention, common, oracle, performance, problem
from .common import Row, WrongResult, length, number
from .oracle import Branch
from .performance import PAGE
from .problem import Setting, Tensors
from .providers import ONE_SOFTMAX, Form, our_branches

RESULTS = common.RESULTS / "decode.jsonl"
PLOT = performance.PLOT.with_name("decode.png")
BASELINE = "dense-cudnn"
STORED = ("k", "v", "ck", "cv")
CHECK_LENGTH = 2048
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
    found = tokens.new_empty(step.B, tokens.shape[2], step.S // c.d, c.D).transpose(1, 2)
    for row, own in zip(found, tokens, strict=True):  # padding copies: a row at a time
        row.copy_(problem.pooled(own[None], c.l, c.d)[0])
    return found


def memory(step: Step) -> int:
    """Bytes that a size takes at most: k, v and the values of `selected`, the windows, all of it in
    pages too, keys and values of one row in fp64, the cache's flush, and 2 GiB."""
    c = step.setting
    tokens = step.S * c.K * c.D * c.dtype.itemsize
    return (
        int(step.B * tokens * 2 * (3 + 2 / c.d)) + 4 * step.S * c.D * 8 + common.FLUSH_BYTES + 2**31
    )


# bytes


def tokens_read(step: Step) -> int:
    """Tokens of a row that one KV head must read in the selected branch and the window: the window
    and the local blocks of all new queries once, the initial blocks, and the n scored ones of each
    query (as many as there can be), as if none of these lay in the window."""
    c, (first, last) = step.setting, (step.positions[0], step.positions[-1])
    near = min(max(0, first - c.w), max(0, (first // c.s - c.local + 1) * c.s))
    candidates = max(0, last // c.s - max(c.local, 1) + 1 - c.initial)
    return last + 1 - near + min(step.T * c.n, candidates) * c.s + min(c.initial * c.s, near)


def bytes_of(step: Step, entries: int) -> int:
    """A key and a value of so many tokens or windows of each row and KV head; q and the output."""
    c = step.setting
    return 2 * step.B * c.D * c.dtype.itemsize * (c.K * entries + step.T * c.H)


# providers


class Ours:
    """The whole of `decode_attention`."""

    factor = 2.0

    def __init__(self, name: str, importance: str) -> None:
        self.name, self.importance = name, importance

    def sized(self, step: Step) -> Step:
        """The step with the provider's own sizes."""
        return step

    def why_not(self, step: Step, device: torch.device) -> str | None:
        return None

    def prepare(self, x: Tensors, step: Step) -> None:
        """Put what a call needs besides its inputs into x. Not timed."""

    def stored(self, x: Tensors, step: Step) -> Tensors:
        """Keys and values as a cache has them."""
        return {name: x[name] for name in STORED}

    def call(self, x: Tensors, step: Step) -> Tensor:
        tensors: Any = {name: x[name] for name in ("q", "branch_gates", "lengths")}
        return decode_attention(
            **tensors | self.stored(x, step),
            sliding_window_size=step.setting.w,
            importance=self.importance,
            # by name: `auto` might time what it fell back to
            backend="triton" if x["q"].is_cuda else "eager",
            **step.setting.ranking,
        )

    def branches(self, step: Step) -> list[Branch]:
        return our_branches(step.setting)

    def bytes(self, step: Step) -> int:
        """Every window that the last query sees, and some of the tokens."""
        return bytes_of(step, step.positions[-1] // step.setting.d + tokens_read(step))


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

    def call(self, x: Tensors, step: Step) -> Tensor:
        tensors: Any = {name: x[name] for name in ("q", "k", "v", "ck", "lengths")}
        return decode_attention(
            **tensors, cq=x.get("cq"), cv=None, branch_gates=None, branches=("selected",),
            sliding_window_size=0,
            importance=self.importance, backend="triton" if x["q"].is_cuda else "eager",
            **step.setting.ranking,
        )  # fmt: skip

    def branches(self, step: Step) -> list[Branch]:
        c = step.setting
        return [oracle.chosen(c.s, c.n, c.initial, c.local)]

    def bytes(self, step: Step) -> int:
        """The key of every window, and some of the tokens."""
        keys = bytes_of(step, step.positions[-1] // step.setting.d) - bytes_of(step, 0)
        keys //= 2 * (step.setting.K if self.form.index else 1)
        return keys + bytes_of(step, tokens_read(step))


class Paged(Ours):
    """Of pages that lie anywhere."""

    def prepare(self, x: Tensors, step: Step) -> None:
        device, B = x["q"].device, step.B
        pages = B * (step.S // self.page_size(step))
        generator = torch.Generator(device).manual_seed(0)
        order = torch.randperm(pages, generator=generator, device=device, dtype=torch.int32)
        x["page_table"] = order.view(B, -1)
        x |= {f"pages of {name}": self.paged(x[name], x["page_table"]) for name in STORED}
        x["v in pages"] = x["v"]

    def stored(self, x: Tensors, step: Step) -> Tensors:
        pages = {name: x[f"pages of {name}"] for name in STORED}
        if x["v"] is not x["v in pages"]:
            pages["v"] = self.paged(x["v"], x["page_table"])
        return {**pages, "page_table": x["page_table"]}

    @staticmethod
    def page_size(step: Step) -> int:
        """Tokens."""
        s = step.setting.s
        return next(size for size in (4 * s, s) if step.S % size == 0)

    @staticmethod
    def paged(t: Tensor, table: Tensor) -> Tensor:
        """Pages [pages, n, K, D], views of storage [pages, K, n, D], of rows [B, N, K, D]."""
        rows = t.unflatten(1, (table.shape[1], -1)).transpose(2, 3)
        pages = t.new_empty(table.numel(), *rows.shape[2:])
        pages[table.long()] = rows
        return pages.transpose(1, 2)


class Dense:
    """Attention to everything, by one backend of `scaled_dot_product_attention`, with heads
    that share keys as such (cuDNN is faster so on an H200), or as rows of queries."""

    importance, factor = None, 4.0

    def __init__(self, name: str, kernels: SDPBackend, as_rows: bool) -> None:
        self.name, self.kernels, self.as_rows = name, kernels, as_rows

    def sized(self, step: Step) -> Step:
        return step

    def why_not(self, step: Step, device: torch.device) -> str | None:
        if self.kernels == SDPBackend.FLASH_ATTENTION and step.T > 1:
            return "takes no mask, which several new tokens need"
        return None

    def prepare(self, x: Tensors, step: Step) -> None:
        """Queries [B H T D] or [B K (G T) D], and for several tokens the mask, as it is added."""
        c = step.setting
        x["rows"] = x["q"].transpose(1, 2)
        if self.as_rows:
            x["rows"] = x["rows"].unflatten(1, (c.K, c.G)).flatten(2, 3)
        i = torch.tensor(step.positions, device=x["q"].device)
        hidden = torch.arange(step.S, device=i.device) > i[:, None]
        x["mask"] = hidden.new_zeros(hidden.shape, dtype=c.dtype).masked_fill(hidden, -torch.inf)
        if self.as_rows:
            x["mask"] = x["mask"].repeat(c.G, 1)

    def call(self, x: Tensors, step: Step) -> Tensor:
        c, cuda = step.setting, x["q"].is_cuda
        keys, values = (x[name].transpose(1, 2) for name in ("k", "v"))
        mask = x["mask"] if step.T > 1 else None
        with sdpa_kernel(self.kernels if cuda else SDPBackend.MATH):
            out = F.scaled_dot_product_attention(
                x["rows"], keys, values, attn_mask=mask, enable_gqa=not self.as_rows
            )
        if self.as_rows:
            out = out.unflatten(2, (c.G, step.T)).flatten(1, 2)
        return out.transpose(1, 2)

    def branches(self, step: Step) -> list[Branch]:
        return [oracle.window(None)]

    def bytes(self, step: Step) -> int:
        return bytes_of(step, step.S)


Provider = Ours | Dense
# the baseline first: others are compared with it
PROVIDERS: tuple[Provider, ...] = (
    Dense(BASELINE, SDPBackend.CUDNN_ATTENTION, as_rows=False),
    Dense("dense-flash", SDPBackend.FLASH_ATTENTION, as_rows=True),
    Ours("ours", "logits"),
    Ours("ours-probs", "probs"),
    Paged("ours-paged", "logits"),
    *(OneSoftmax(name, form) for name, form in ONE_SOFTMAX.items() if not form.dense),
)


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
        WrongResult
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
        WrongResult
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
    provider: Provider, x: Tensors, step: Step, passed: set[Any], seconds: float,
    device: torch.device,
) -> Row:  # fmt: skip
    """A provider's times; `passed` are the small checks behind it."""
    reason = provider.why_not(step, device)
    if reason is not None:
        return {"failed": reason}
    if (provider.name, small(step)) not in passed:
        check(provider, small(step), device)
        passed.add((provider.name, small(step)))
    return measure(provider, x, step, seconds, device)


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
            timed = functools.partial(one, provider, dict(x), own, passed, seconds, device)
            row = common.attempt(timed, device)
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


# tables and plot

Shape = tuple[int, int, int]  # H, K, T


class Steps:
    """The latest row of each (H, K, T), B, provider and S."""

    def __init__(self, rows: Sequence[Row]) -> None:
        gpu = Counter(row["gpu"] for row in rows).most_common(1)[0][0]
        self.used = [row for row in rows if row["gpu"] == gpu]
        self.cases: dict[tuple[Shape, int, str, int], Row] = {}
        for row in self.used:
            self.cases[(row["H"], row["K"], row["T"]), row["B"], row["provider"], row["S"]] = row
        self.panels = sorted({case[:2] for case in self.cases})

    def providers(self, shape: Shape, B: int) -> list[str]:
        """As they were first timed."""
        return list(dict.fromkeys(case[2] for case in self.cases if case[:2] == (shape, B)))

    def lengths(self, shape: Shape, B: int) -> list[int]:
        return sorted({case[3] for case in self.cases if case[:2] == (shape, B)})

    def of(self, shape: Shape, B: int, provider: str, field: str) -> dict[int, Any]:
        """A field by S, of the rows that have it."""
        rows = {S: self.cases.get((shape, B, provider, S), {}) for S in self.lengths(shape, B)}
        return {S: row[field] for S, row in rows.items() if field in row}


def times(steps: Steps, shape: Shape, B: int) -> str:
    """Microseconds, the speed-up over dense cuDNN, and the bandwidth reached."""
    lengths = steps.lengths(shape, B)
    lines = [["µs (times as fast as dense cuDNN); GB/s", *map(length, lengths)]]
    for name in steps.providers(shape, B):
        us, gbps, speedup = (
            steps.of(shape, B, name, field) for field in ("p50_us", "gbps", "speedup_over_cudnn")
        )
        cells = []
        for S in lengths:
            cell = "" if S not in us else number(us[S])
            if S in speedup and name != BASELINE:
                cell += f" ({number(speedup[S])})"
            cells.append(cell and f"{cell}; {gbps[S]:.0f}")
        if any(cells):
            lines.append([name, *cells])
    return "B={}, H={}, K={}, T={}:\n\n".format(B, *shape) + common.markdown(lines)


def where(rows: Sequence[Row]) -> str:
    return "{gpu}, driver {driver}, torch {torch}, triton {triton}, commit {commit}.".format(
        **rows[-1]
    )


def table(rows: Sequence[Row]) -> str:
    if not rows:
        return common.NO_ROWS
    steps = Steps(rows)
    parts = [times(steps, *panel) for panel in steps.panels]
    return "\n\n".join([*parts, where(steps.used)])


def one_softmax(rows: Sequence[Row]) -> str:
    """The newest run of it, with what was timed beside it."""
    run = performance.run_of(rows, performance.is_one_softmax)
    if not run:
        return common.NO_ROWS
    steps = Steps(run)
    return "\n\n".join([*(times(steps, *panel) for panel in steps.panels), where(steps.used)])


TABLES = {PAGE: {"decode": table, "decode_one_softmax": one_softmax}}


def draw_page(rows: Sequence[Row]) -> None:
    """Tables and plot."""
    common.draw_pages(TABLES, rows)
    if rows and pictured(Steps(rows)):
        plot(Steps(rows))


def pictured(steps: Steps) -> list[tuple[Shape, int]]:
    """The panels of the first shape that was timed."""
    timed = [case[:2] for case, row in steps.cases.items() if "p50_us" in row]
    return sorted({panel for panel in timed if panel[0] == timed[0][0]})


def plot(steps: Steps) -> None:
    """p50 against S, log-log, one panel for each B."""
    panels = pictured(steps)
    figure, axes = common.subplots(1, len(panels), (4.6 * len(panels), 4.2))
    for axis, (shape, B) in zip(axes[0], panels, strict=True):
        for name in steps.providers(shape, B):
            points = steps.of(shape, B, name, "p50_us")
            style = "o-" if name.startswith("ours") else "s--"
            if points:
                axis.plot(list(points), list(points.values()), style, ms=4, label=name)
        common.log_log(axis, steps.lengths(shape, B), "S", "µs")
        axis.set(title="B={}, H={}, K={}, T={}".format(B, *shape))
    axes[0][0].legend(fontsize=7)
    common.save(figure, PLOT)


# the command line


def arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = common.parser_of("decode", __doc__)
    add = parser.add_argument
    names = [provider.name for provider in PROVIDERS]
    add("--lengths", type=int, nargs="+", default=[2**e for e in range(12, 19)], metavar="S")
    add("--batches", type=int, nargs="+", default=[1, 16, 64], metavar="B")
    add("--new", type=int, nargs="+", default=[1], metavar="T", help="new tokens of a step")
    add("--heads", nargs="+", default=["64/4"], metavar="H/K")
    add("--providers", nargs="+", choices=names, default=names)
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
        draw_page(rows)
        return rows
    out = common.out_of(args, RESULTS)
    chosen = [provider for provider in PROVIDERS if provider.name in args.providers]
    seconds = min(args.seconds, 0.05) if args.quick else args.seconds
    rows = run(steps_of(args), chosen, out, seconds, device)
    ours = [row for row in rows if "failed" in row and row["provider"].startswith("ours")]
    if ours:
        raise SystemExit(f"ours not timed in {len(ours)} cases, the first: {line(ours[0])}")
    return rows


if __name__ == "__main__":
    main()
