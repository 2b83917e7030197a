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
(Counted by tiles that are not empty, as often, partial tiles would flatter.)

No provider is timed before it passed `oracle.py` in this process: outputs and all gradients at a
small length whole, against fp64 and within a budget; at the timed length some queries, and two
laws of all gradients.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch._functorch.config
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, flex_attention, sdpa_kernel
from torch.nn.attention.flex_attention import create_mask

from native_sparse_attention import masks
from native_sparse_attention.masks import catalog

from . import attention, common, oracle
from .common import Row
from .oracle import Branch
from .performance import PASSES, both
from .problem import Setting, Tensors
from .providers import Provider

PAGE = common.ROOT / "docs" / "masks.md"
RESULTS = common.RESULTS / "masks.jsonl"
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
        mod, q_len, kv_len = catalog.make(self.name, T, device)
        if q_len != kv_len:
            raise ValueError(f"{self.name} has {kv_len} keys for {q_len} queries")
        return mod


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


class Flash(Provider):
    """Causal attention by FlashAttention, or on the CPU by what SDPA has there."""

    name = "flash"

    def call(self, x: Tensors, setting: Setting) -> Tensor:
        q, k, v = (x[name].transpose(1, 2) for name in self.names)
        kernels = SDPBackend.FLASH_ATTENTION if q.is_cuda else SDPBackend.MATH
        with sdpa_kernel(kernels):
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return out.transpose(1, 2)

    def branches(self, setting: Setting) -> list[Branch]:
        return [oracle.window(None)]


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


def compiled() -> Callable[..., Any]:
    return torch.compile(flex_attention.flex_attention, dynamic=False)


class Flex(UnderMask):
    """flex_attention under the block mask, compiled for this mask alone."""

    name = "flex"

    def __init__(self, mask: Mask) -> None:
        super().__init__(mask)
        self.attend = compiled()

    def why_not(self, setting: Setting, device: torch.device) -> str | None:
        return None if device.type == "cuda" else "flex_attention has no gradients without cuda"

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
    counts = masks.tiles.tile_counts(mask.mod(T, device), T, T, device)
    return {
        "mask": mask.label,
        "pairs": int(counts.sum()),
        "allowed": round(int(counts.sum()) / T**2, 5),
        "skipped": round(float((counts == 0).double().mean()), 5),
    }


def one(
    provider: Provider, about: Row, setting: Setting, check_length: int, seconds: float, device: Any
) -> list[Row]:
    """Rows of the forward and the backward pass, or the one that says why there are none."""
    rows: list[Row] = []

    def measure() -> Row:
        small = dataclasses.replace(setting, T=min(setting.T, check_length))
        x = attention.prepared(provider, small, device)
        attention.verify(provider, x, small, None)
        rows.extend(attention.measure(provider, setting, seconds, device))
        return {}

    reason = provider.why_not(setting, device)
    failed = {"failed": reason} if reason else common.attempt(measure, device)
    head = {**about, "provider": provider.name}
    return [{**head, **row} for row in ([failed] if failed else rows)]


def run(
    names: list[str],
    scores: list[str],
    settings: list[Setting],
    out: Path | None,
    check_length: int,
    seconds: float,
    device: torch.device,
) -> list[Row]:
    known, rows = common.environment(device), []
    for setting in settings:
        fields = setting.row()
        size = {name: fields[name] for name in ("T", "H", "D", "dtype")}
        cases: list[tuple[Row, list[Provider]]] = [({"mask": NO_MASK}, [Flash()])]
        for mask in map(Mask, names):
            cases.append((facts(mask, setting.T, device), [Sdpa(mask), Flex(mask)]))
        for score in scores:
            mask = Mask("causal", score)
            cases.append((facts(mask, setting.T, device), [Flex(mask)]))
        for about, providers in cases:
            torch._dynamo.reset()
            for provider in providers:
                about = {**about, **size}
                for row in one(provider, about, setting, check_length, seconds, device):
                    row = {**row, **known}
                    common.append_row(out, row)
                    rows.append(row)
                    print(line(row), flush=True)
                common.release()
    return rows


def line(row: Row) -> str:
    """A row as a person reads it."""
    head = f"{row['mask']:30} T={row['T']:<6} {row['provider']:6}"
    if "failed" in row:
        return f"{head} {row['failed']}"
    return f"{head} {row['pass']:8} {row['p50_ms']:9.3f} ms {row['tflops']:7.1f} TFLOP/s"


# the table


def table(rows: Sequence[Row]) -> str:
    """Time and TFLOP/s, forward / backward; the latest row of each case."""
    latest: dict[tuple[int, str], dict[tuple[str, str], Row]] = {}
    for row in rows:
        case = latest.setdefault((row["T"], row["mask"]), {})
        if "failed" in row:
            for name in PASSES:
                case.pop((row["provider"], name), None)
        case[row["provider"], row.get("pass", "failed")] = row
        if "pass" in row:
            case.pop((row["provider"], "failed"), None)
    if not latest:
        return common.NO_ROWS

    def cells(case: dict[tuple[str, str], Row], provider: str) -> list[str]:
        passes = [case.get((provider, name), {}) for name in PASSES]
        if (provider, "failed") in case:
            return [case[provider, "failed"]["failed"].replace("|", "/"), ""]
        return [both(row.get(field) for row in passes) for field in ("p50_ms", "tflops")]

    def percent(case: dict[tuple[str, str], Row], field: str) -> str:
        share = next(iter(case.values())).get(field)
        return "" if share is None else f"{100 * share:.1f}"

    head = ["forward / backward", "pairs allowed, %", "tiles skipped, %"]
    for provider in ("sdpa, mask", "flex"):
        head += [f"{provider}: ms", "TFLOP/s"]
    parts = []
    for T in sorted({T for T, _ in latest}):
        lines = [head]
        dense = latest.get((T, NO_MASK))
        if dense is not None:
            lines.append(["*causal, flash*", "", "", *cells(dense, "flash"), "", ""])
        for (length, name), case in latest.items():
            if length == T and name != NO_MASK:
                shares = [percent(case, field) for field in ("allowed", "skipped")]
                label = " + ".join(f"`{part}`" for part in name.split(" + "))
                lines.append([label, *shares, *cells(case, "sdpa"), *cells(case, "flex")])
        last = next(row for row in reversed(rows) if row["T"] == T)
        parts.append("T = {T}, H = {H}, D = {D}, {dtype}:".format(**last))
        parts.append(common.markdown(lines))
    commits = dict.fromkeys(row["commit"] for case in latest.values() for row in case.values())
    where = "{gpu}, torch {torch}, triton {triton}, ".format(**rows[-1])
    where += f"commit{'s' * (len(commits) > 1)} {', '.join(commits)}."
    return "\n\n".join([*parts, where])


TABLES = {PAGE: {"masks": table}}


def main(argv: list[str] | None = None) -> list[Row]:
    known = [name for name in catalog.CATALOG if name not in ASYMMETRIC]
    parser = common.parser_of("masks", __doc__)
    parser.add_argument("--masks", nargs="*", choices=known, default=known)
    parser.add_argument("--scores", nargs="*", choices=list(SCORES), default=list(SCORES))
    parser.add_argument("--lengths", type=int, nargs="+", default=[8192, 16384])
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--width", type=int, default=64, help="of a head")
    args = parser.parse_args(argv)
    device, out = torch.device(args.device), common.out_of(args, RESULTS)
    if args.table:
        rows = common.read_rows(args.out or RESULTS)
        common.draw_pages(TABLES, rows)
        return rows
    # a kept graph runs backward again and again
    torch._functorch.config.donated_buffer = False
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    sizes = [(T, args.heads, args.width) for T in args.lengths]
    seconds, check_length = args.seconds, CHECK_LENGTH
    if args.quick:
        seconds = min(seconds, 0.05)
        sizes = [(2048, 4, 64)] if device.type == "cuda" else [(144, 2, 16)]
        check_length = 96
    settings = [Setting(T, H, H, D, dtype=dtype) for T, H, D in sizes]
    rows = run(args.masks, args.scores, settings, out, check_length, seconds, device)
    if device.type == "cuda" and any("failed" in row for row in rows):
        sys.exit("not all were timed: " + line(next(row for row in rows if "failed" in row)))
    return rows


if __name__ == "__main__":
    main()
