"""A step of decoding: its inputs, the bytes that it must read, and who computes it."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from native_sparse_attention.ops import decode

from . import common, oracle, problem
from .common import Row
from .oracle import Branch
from .problem import Setting, Tensors
from .providers import ONE_SOFTMAX, Form, our_branches

BASELINE = "dense-cudnn"
STORED = ("k", "v", "ck", "cv")


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
        """What a cache keeps between steps."""
        x["counters"] = decode.workspace(step.B, step.setting.K, x["q"].device)

    def stored(self, x: Tensors, step: Step) -> Tensors:
        """Keys and values as a cache has them."""
        return {name: x[name] for name in STORED}

    def call(self, x: Tensors, step: Step) -> Tensor:
        tensors: Any = {name: x[name] for name in ("q", "branch_gates", "lengths", "counters")}
        return decode.decode_attention(
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
        super().prepare(x, step)
        c, keys = step.setting, x["k"]
        if self.form.index:  # a cache has the keys of one head, and a query for each head
            x["cq"] = torch.randn_like(x["q"][:, :, : c.K]).repeat_interleave(c.G, 2)
            keys = torch.randn_like(keys[:, :, :1].transpose(1, 2)).transpose(1, 2)
        keys = keys if c.l == 1 else windows_of(keys, step)
        x["ck"] = keys.expand(-1, -1, c.K, -1)

    def call(self, x: Tensors, step: Step) -> Tensor:
        tensors: Any = {name: x[name] for name in ("q", "k", "v", "ck", "lengths", "counters")}
        return decode.decode_attention(
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
        super().prepare(x, step)
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
