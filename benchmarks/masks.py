"""flex_attention under each mask of the gallery, against SDPA with the mask spelled out.

    python -m benchmarks.masks                time every mask, append rows
    python -m benchmarks.masks --table        redraw the table of docs/masks.md from the rows
    python -m benchmarks.masks --quick        small ones, nothing recorded

One row of tokens, random q, k, v, as many keys as queries; the modifications of scores each under
the causal mask, and in flex alone, as SDPA has no form for them. "flash" is causal attention to all
of the past by FlashAttention, whatever the mask: what a user has without it. "sdpa" is
`scaled_dot_product_attention` with a boolean mask [T S], "flex" is flex_attention, compiled, under
a block mask; both masks are made outside the timing.

TFLOP/s counts what the mask asks for: two products of 2 D operations for every allowed pair and
head, so 4 D H pairs, and five products backward where the forward pass has two, 2.5 times as many:
scores are formed again, and then there are dV, dP, dQ and dK. Pairs that a tile computes and throws
away are no work done; a kernel that skips nothing therefore shows few TFLOP/s under a sparse mask.

No provider is timed before it passed `oracle.py` in this process: outputs and all gradients at a
small length whole, against fp64 and within a budget; at the timed length some queries, and two
laws of all gradients.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch._functorch.config
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend
from torch.nn.attention.flex_attention import create_mask

from native_sparse_attention import masks
from native_sparse_attention.masks import catalog

from . import attention, common
from .common import Row, both
from .oracle import Branch
from .problem import Setting, Tensors
from .providers import Dense, Provider, compiled

PAGE = common.ROOT / "docs" / "masks.md"
NO_MASK = "(all of the past)"

# of masks whose keys are not the tokens: they are not timed as self-attention is
ASYMMETRIC = ("compress",)
CHECK_LENGTH = 512
STRIP = 1024  # queries whose masks are spelled out at once


# of the causal mask's logits, by the number of heads
SCORES: dict[str, Callable[[int, torch.device], masks.ScoreMod]] = {
    "alibi": lambda H, device: masks.alibi(H, device=device),
    "alibi, functional": lambda H, device: functools.partial(
        masks.alibi_bias, slopes=masks.alibi_slopes(H, device)
    ),
    "relative_bias": lambda H, device: masks.relative_bias(
        torch.linspace(-1, 1, 129 * H, device=device).view(H, 129)
    ),
    "soft_cap": lambda H, device: masks.soft_cap(2.0),
    "soft_cap, approximate": lambda H, device: masks.soft_cap(2.0, approximate=True),
}

# of flex_attention: entries of a table go through shared memory, and torch's three stages of them
# take more of it than a GPU has
KERNEL_OPTIONS = {"relative_bias": {"num_stages": 2}}


@dataclasses.dataclass(frozen=True)
class Mask:
    """A mask of the catalogue, at any length, and what becomes of scores under it."""

    name: str
    score: str | None = None

    @property
    def label(self) -> str:
        return self.name if self.score is None else f"{self.name} + {self.score}"

    def score_mod(self, setting: Setting, device: torch.device) -> masks.ScoreMod | None:
        return None if self.score is None else SCORES[self.score](setting.H, device)

    def mod(self, T: int, device: torch.device) -> masks.MaskMod:
        return catalog.make(self.name, T, device)[0]


@functools.lru_cache(maxsize=4)
def rows_of(mask: Mask, T: int, device: torch.device) -> Tensor:
    """How many keys each query sees, [T]."""
    strips = []
    for rows in torch.arange(T, device=device).split(STRIP):
        strips.append(seen(mask, T, rows).sum(1))
    return torch.cat(strips)


def seen(mask: Mask, T: int, rows: Tensor) -> Tensor:
    """The mask of some queries, [r T]."""
    mod = mask.mod(T, rows.device)

    def of_rows(b: Tensor, h: Tensor, r: Tensor, j: Tensor) -> Tensor:
        return mod(b, h, rows[r], j)

    return create_mask(of_rows, 1, 1, len(rows), T, device=str(rows.device))[0, 0]


class UnderMask(Provider):
    """Attention under a mask, by one way to compute it."""

    def __init__(self, mask: Mask) -> None:
        self.mask = mask

    def branches(self, setting: Setting) -> list[Branch]:
        def keys(i: Tensor, j: Tensor, indices: Tensor | None) -> Tensor:
            return seen(self.mask, setting.T, i[:, 0])

        def count(i: Tensor) -> Tensor:
            return rows_of(self.mask, setting.T, i.device)[i]

        def score(sim: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            mod = self.mask.score_mod(setting, sim.device)
            return sim if mod is None else mod(sim, torch.zeros_like(h), h, i, j)

        return [Branch("k", "v", keys, count, score=score)]


class Sdpa(UnderMask):
    """SDPA with the mask spelled out."""

    name = "sdpa"

    def prepare(self, x: Tensors, setting: Setting) -> None:
        i = torch.arange(setting.T, device=x["q"].device)
        x["mask"] = torch.cat([seen(self.mask, setting.T, rows) for rows in i.split(STRIP)])

    def call(self, x: Tensors, setting: Setting) -> Tensor:
        q, k, v = (x[name].transpose(1, 2) for name in self.names)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=x["mask"])
        return out.transpose(1, 2)


class Flex(UnderMask):
    """flex_attention under the block mask, compiled for this mask alone."""

    name, devices = "flex", ("cuda",)  # without it flex_attention has no gradients

    def __init__(self, mask: Mask) -> None:
        super().__init__(mask)
        self.attend = compiled()

    def prepare(self, x: Tensors, setting: Setting) -> None:
        device = x["q"].device
        mod = self.mask.mod(setting.T, device)
        self.block_mask = masks.block_mask_of(mod, setting.T, setting.T, device)
        self.score_mod = self.mask.score_mod(setting, device)

    def call(self, x: Tensors, setting: Setting) -> Tensor:
        q, k, v = (x[name].transpose(1, 2) for name in self.names)
        options: dict[str, Any] = {"score_mod": self.score_mod, "block_mask": self.block_mask}
        if q.is_cuda and self.mask.score in KERNEL_OPTIONS:
            options["kernel_options"] = KERNEL_OPTIONS[self.mask.score]
        return self.attend(q, k, v, **options).transpose(1, 2)


# all of them


def facts(mask: Mask, T: int, device: torch.device) -> Row:
    """What share of the pairs is allowed, and what share of tiles holds none."""
    counts = masks.nsa.tile_counts(mask.mod(T, device), T, T, device)
    return {
        "mask": mask.label,
        "pairs": int(counts.sum()),
        "allowed": round(int(counts.sum()) / T**2, 5),
        "skipped": round(float((counts == 0).double().mean()), 5),
    }


# the table


def label(row: Row) -> str:
    if row["mask"] == NO_MASK:
        return "*causal, flash*"
    return " + ".join(f"`{part}`" for part in row["mask"].split(" + "))


def table(rows: Sequence[Row]) -> str:
    """What a mask allows and skips, then time and TFLOP/s, forward / backward."""
    shares, cells = {"allowed": "pairs allowed, %", "skipped": "tiles skipped, %"}, []
    for row in rows:
        provider = "flex" if row["provider"] == "flex" else "sdpa, mask"
        columns = {"p50_ms": f"{provider}: ms", "tflops": f"{provider}: TFLOP/s"}
        columns = columns if "failed" in row else shares | columns
        cells += [row | {"field": field, "column": name} for field, name in columns.items()]

    def cell(passes: dict[str, Row]) -> str:
        row = next(iter(passes.values()))
        if row["field"] in shares:
            return f"{100 * row[row['field']]:.1f}" if row["field"] in row else ""
        return both(passes, row["field"])

    return common.grid(
        cells, "forward / backward", label, lambda row: row["column"], cell,
        lambda row: "T = {T}, H = {H}, D = {D}, {dtype}".format(**row),
    )  # fmt: skip


TABLES = {PAGE: {"masks": table}}


# the program


def options(parser: argparse.ArgumentParser) -> None:
    known = [name for name in catalog.CATALOG if name not in ASYMMETRIC]
    add = parser.add_argument
    add("--masks", nargs="*", choices=known, default=known)
    add("--scores", nargs="*", choices=list(SCORES), default=list(SCORES))
    add("--lengths", type=int, nargs="+", default=[8192, 16384])
    add("--heads", type=int, default=16)
    add("--width", type=int, default=64, help="of a head")


def run(args: argparse.Namespace, recorder: common.Recorder) -> None:
    device, cuda = args.device, args.device.type == "cuda"
    # a kept graph runs backward again and again
    torch._functorch.config.donated_buffer = False
    dtype = torch.bfloat16 if cuda else torch.float32
    sizes = [(T, args.heads, args.width) for T in args.lengths]
    timer = attention.Timer(CHECK_LENGTH, args.seconds, device)
    if args.quick:
        sizes = [(2048, 4, 64)] if cuda else [(144, 2, 16)]
        timer = attention.Timer(96, min(args.seconds, 0.05), device)
    flash = Dense("flash", SDPBackend.FLASH_ATTENTION if cuda else None)
    for T, H, D in sizes:
        setting = Setting(T, H, H, D, dtype=dtype)
        size = {name: setting.row()[name] for name in ("T", "H", "D", "dtype")}
        cases: list[tuple[Row, list[Provider]]] = [({"mask": NO_MASK}, [flash])]
        for mask in map(Mask, args.masks):
            cases.append((facts(mask, T, device), [Sdpa(mask), Flex(mask)]))
        for score in args.scores:
            mask = Mask("causal", score)
            cases.append((facts(mask, T, device), [Flex(mask)]))
        for about, providers in cases:
            torch._dynamo.reset()
            for provider in providers:
                for row in timer.rows(provider, setting):
                    recorder.add({**about, **size, "provider": provider.name, **row})


BENCHMARK = common.Benchmark(
    "masks", __doc__, options, run, ("mask", "T", "provider", "pass"), TABLES, seconds=0.3
)
main = BENCHMARK.main

if __name__ == "__main__":
    main()
