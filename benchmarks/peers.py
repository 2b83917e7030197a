"""Published kernels that are no packages: adapters that call them from a checkout the user names.

    python -m benchmarks.attention --peer fsa=PATH flash_nsa=PATH

Each adapter says what its peer computes, and which settings it cannot run: these leave a row with
"refused". Selected branches get the block indices of this library's ranking, as the part "selected"
of "ours" does. The interfaces are those of the repositories in late 2026. An adapter whose peer has
changed since leaves a row with the error.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from . import common, oracle, problem
from .oracle import Branch
from .problem import Setting, Tensors
from .providers import OursSelected, Provider

HALF = (torch.bfloat16, torch.float16)


class Peer(Provider):
    """A provider whose code lies in a checkout.

    module:     dotted name of what is imported
    source:     its repository
    computes:   in words, for the rows
    """

    source = computes = ""
    devices = ("cuda",)
    factor = 4.0

    def __init__(self, path: Path) -> None:
        self.path = path
        revision = common.output_of("git", "-C", str(path), "rev-parse", "--short=10", "HEAD")
        self.note = f"{self.computes}; {self.source}, revision {revision or 'unknown'}"

    def missing(self) -> str | None:
        reason = super().missing()
        for path in (self.path.resolve(), self.path):
            reason = reason and reason.replace(str(path), "PATH")
        return reason

    def unfit(self, setting: Setting) -> str | None:
        return None if setting.dtype in HALF else f"{self.name} takes bf16 and fp16"

    def load(self, module: str | None = None) -> Any:
        """Its module, or another one of the checkout.

        Raises:
            ImportError: there is none, or another of its name was imported in its place.
        """
        with mock.patch.object(sys, "path", [str(self.path), *sys.path]):
            loaded = importlib.import_module(module or self.module)
        if not Path(loaded.__file__ or "").resolve().is_relative_to(self.path.resolve()):
            raise ImportError(f"{loaded.__name__} was imported from elsewhere, not from PATH")
        return loaded


def row(t: Tensor) -> Tensor:
    """[1 T H D] as [T H D]: a view, whose gradient is one too (that of `t[0]` is a copy)."""
    return t.squeeze(0)


def cu_seqlens(setting: Setting, device: torch.device) -> Tensor:
    """Offsets of one sequence."""
    return torch.tensor([0, setting.T], dtype=torch.int32, device=device)


def every_block(indices: Tensor, setting: Setting) -> Tensor:
    """The ranked and the forced blocks of each query, ascending: [K T blocks], int32; the number of
    blocks where there are no more."""
    c, device = setting, indices.device
    none = -(-c.T // c.s)
    own = torch.arange(c.T, device=device)[:, None] // c.s
    initial = torch.arange(c.initial, device=device).expand(c.T, -1)
    local = own - torch.arange(c.local, device=device)
    initial, local = (
        initial.masked_fill(initial > own, none),
        local.masked_fill(local < c.initial, none),
    )
    forced = torch.cat((initial, local), 1)
    ranked = indices[0].masked_fill(indices[0] < 0, none).int()
    forced = forced[:, None].expand(-1, c.K, -1).int()
    return torch.cat((ranked, forced), -1).sort(-1).values.transpose(0, 1).contiguous()


class PeerSelected(Peer, OursSelected):
    """The selected branch alone, with the block indices of this library's ranking."""

    computes = "the selected branch"
    strided, alike = False, None
    padding: int | None = -1  # of slots without a block; None for the number of blocks

    def prepare(self, x: Tensors, setting: Setting) -> None:
        OursSelected.prepare(self, x, setting)
        blocks = every_block(x["indices"], setting)
        if self.padding is not None:
            blocks = blocks.masked_fill(blocks == -(-setting.T // setting.s), self.padding)
        x["blocks"] = blocks
        x["cu_seqlens"] = cu_seqlens(setting, blocks.device)


# Flash NSA


def ended(l: int, d: int, gate: int | None = None) -> Branch:
    """Windows `[j d, j d + l)` of which the query sees the last token."""
    count = lambda i: ((i + 1 - l) // d + 1).clamp(min=0)  # noqa: E731
    return Branch("ck", "cv", lambda i, j, _: j * d + l - 1 <= i, count, gate)


class FlashNsa(Peer):
    """The setup that all parts of Flash NSA share: settings of a global class."""

    module, source = "flash_nsa", "mdy666/Scalable-Flash-Native-Sparse-Attention"

    def unfit(self, setting: Setting) -> str | None:
        c = setting
        for name, value in {"d": c.d, "s": c.s, "D": c.D}.items():
            if value & (value - 1):
                return f"{self.name} takes powers of two for {name}, not {value}"
        if c.l % c.d or c.s % c.d:
            return f"{self.name} takes l and s that are multiples of d"
        return super().unfit(setting)

    def set_up(self, x: Tensors, setting: Setting) -> None:
        c, helper = setting, self.load().NSAHelper
        helper.set_hyperparameters(
            kernel_size=c.l,
            stride=c.d,
            block_size=c.s,
            window_size=c.w,
            top_n=c.n + c.initial + c.local,
            num_init_blocks=c.initial,
            num_local_blocks=c.local,
        )
        # offsets that it has seen it does not set up again, whatever the settings
        helper.x_cu_seqlens = None
        helper.init_cu_seqlens(cu_seqlens(setting, x["q"].device))
        # ours begin with the windows that reach before token 0; it has none of them
        for name in {"ck", "cv"} & x.keys():
            x[name] = x[name].detach()[:, c.l // c.d - 1 :].contiguous().requires_grad_()

    def prepare(self, x: Tensors, setting: Setting) -> None:
        self.set_up(x, setting)


class FlashNsaCompressed(FlashNsa):
    name, part, names = "flash_nsa", "compressed", ("q", "ck", "cv")
    computes = "the compressed branch"

    def call(self, x: Tensors, setting: Setting) -> Tensor:
        q, ck, cv = (row(x[name]) for name in self.names)
        return self.load().compress_attn(q, ck, cv, sm_scale=setting.D**-0.5)[0][None]

    def branches(self, setting: Setting) -> list[Branch]:
        return [ended(setting.l, setting.d)]


class FlashNsaSelected(PeerSelected, FlashNsa):
    name, padding = "flash_nsa", None

    def prepare(self, x: Tensors, setting: Setting) -> None:
        PeerSelected.prepare(self, x, setting)
        self.set_up(x, setting)

    def call(self, x: Tensors, setting: Setting) -> Tensor:
        q, k, v = (row(x[name]) for name in self.names)
        return self.load().select_attn(q, k, v, x["blocks"], sm_scale=setting.D**-0.5)[None]


class FlashNsaWindow(FlashNsa):
    name, part = "flash_nsa", "window"
    computes = "the window, by flash_attn"

    def call(self, x: Tensors, setting: Setting) -> Tensor:
        q, k, v = (row(x[name]) for name in self.names)
        return self.load().swa_varlen_func(q, k, v, setting.D**-0.5)[None]

    def branches(self, setting: Setting) -> list[Branch]:
        return [oracle.window(setting.w)]


class FlashNsaWhole(FlashNsa):
    """After compression, as "ours" is: its own ranking, three branches, and its gate, which takes
    the gate's logits."""

    name, windowed = "flash_nsa", True
    names = ("q", "k", "v", "ck", "cv", "branch_gates")
    computes = "ranking by probs, compressed, selected and window branch, gate from its logits"

    def compressed(self, x: Tensors, setting: Setting) -> tuple[Tensor, Tensor]:
        """The compressed branch, and the blocks [K T top_n] of the ranking."""
        flash, scale = self.load(), setting.D**-0.5
        q, ck, cv = (row(x[name]) for name in ("q", "ck", "cv"))
        out, lse = flash.compress_attn(q, ck, cv, sm_scale=scale)
        options = dict(sm_scale=scale, maybe_efficient_version=True, scale_slc_p=True)
        return out, flash.slc_topk_indices(q, ck, lse, **options)[0]

    def call(self, x: Tensors, setting: Setting) -> Tensor:
        flash, scale = self.load(), setting.D**-0.5
        q, k, v, gates = (row(x[name]) for name in ("q", "k", "v", "branch_gates"))
        compressed, blocks = self.compressed(x, setting)
        selected = flash.select_attn(q, k, v, blocks, sm_scale=scale)
        if not self.windowed:
            return (gates[..., :1] * compressed + gates[..., 1:2] * selected)[None]
        window = flash.swa_varlen_func(q, k, v, scale)
        combine = self.load("flash_nsa.ops.combine").fused_sigmoid_combine
        return combine(compressed, selected, window, gates.logit())[None]

    def indices(self, x: Tensors, setting: Setting) -> Tensor:
        with torch.no_grad():
            blocks = self.compressed(x, setting)[1].transpose(0, 1)
        slot = torch.arange(blocks.shape[-1], device=blocks.device)
        own = torch.arange(setting.T, device=blocks.device)[:, None, None] // setting.s
        return blocks.masked_fill((slot > own) | (blocks > own), -1)[None].int()

    def branches(self, setting: Setting) -> list[Branch]:
        c = setting
        # all of its top_n blocks are in the indices, the query's own among them
        chosen = oracle.chosen(c.s, c.n + c.initial + c.local - 1, gate=1)
        found = [ended(c.l, c.d, gate=0), chosen]
        return [*found, oracle.window(c.w, gate=2)] if self.windowed else found

    def flops(self, setting: Setting) -> int:
        return super().flops(setting) + problem.scoring_flops(setting, "probs")


class FlashNsaWithoutWindow(FlashNsaWhole):
    """For machines without flash_attn, which its window needs."""

    name, windowed = "flash_nsa-no-window", False
    computes = "ranking by probs, compressed and selected branch, gated; no window"


# of the selected branch alone


class Fsa(PeerSelected):
    """Key-major selected attention, for small groups."""

    name, module, source = "fsa", "fsa.ops", "Relaxed-System-Lab/Flash-Sparse-Attention"

    def unfit(self, setting: Setting) -> str | None:
        if setting.s not in (32, 64, 128, 256):
            return f"fsa takes blocks of 32, 64, 128 or 256 tokens, not {setting.s}"
        return super().unfit(setting)

    def call(self, x: Tensors, setting: Setting) -> Tensor:
        q, k, v = (row(x[name]) for name in self.names)
        attend = self.load().FSA_topk_sparse_attention
        return attend(q, k, v, x["blocks"], setting.s, x["cu_seqlens"], setting.D**-0.5)[None]


class FlashMsa(PeerSelected):
    """CuTe kernels of MiniMax's sparse attention, for given blocks of 128 tokens, the query's own
    first; the reverse index is an extension that it builds at the first call."""

    name, module, source = "flash_msa", "flash_msa", "poolsideai/flash-msa"
    padding = None

    def unfit(self, setting: Setting) -> str | None:
        c = setting
        if c.s != 128:
            return f"flash_msa takes blocks of 128 tokens, not {c.s}"
        if c.D != 128 or c.T % 128:
            return "flash_msa takes heads of 128 and lengths that are multiples of 128"
        if c.n + c.initial + c.local > 32:
            return "flash_msa takes at most 32 blocks"
        return super().unfit(setting)

    def prepare(self, x: Tensors, setting: Setting) -> None:
        """Its schedule, of these blocks in place of those that its proxy heads would select; like
        the ranking, not timed."""
        super().prepare(x, setting)
        c, blocks = setting, x["blocks"]
        own = (torch.arange(c.T, device=blocks.device) // c.s)[:, None]
        # the query's own block before all others
        order = torch.where(blocks == own, -1, blocks).argsort(dim=-1, stable=True)
        blocks = blocks.gather(-1, order)[None]
        q, k, v = (x[name].detach().transpose(1, 2) for name in self.names)
        inner = self.load("flash_msa.flash_msa")
        with mock.patch.object(inner, "select_blocks", lambda *args, **kwargs: blocks):
            self.metadata = inner.prepare_sparse_attention(
                k, k, q, k, v, blocks.shape[-1] * c.s, c.D**-0.5, cu_seqlens=x["cu_seqlens"]
            )

    def call(self, x: Tensors, setting: Setting) -> Tensor:
        q, k, v = (x[name].transpose(1, 2) for name in self.names)
        attend = self.load().sparse_main_attention
        out, _ = attend(q, k, v, self.metadata, setting.D**-0.5)
        return out.unflatten(-1, (setting.H, setting.D))


PEERS: dict[str, tuple[type[Peer], ...]] = {
    "flash_nsa": (
        FlashNsaWhole,
        FlashNsaWithoutWindow,
        FlashNsaCompressed,
        FlashNsaSelected,
        FlashNsaWindow,
    ),
    "fsa": (Fsa,),
    "flash_msa": (FlashMsa,),
}


def checkout(text: str) -> list[Peer]:
    """The adapters of NAME=PATH on the command line."""
    name, _, path = text.partition("=")
    if name not in PEERS or not path:
        known = ", ".join(PEERS)
        raise argparse.ArgumentTypeError(f"expected NAME=PATH, NAME one of {known}, got {text!r}")
    if not Path(path).is_dir():
        raise argparse.ArgumentTypeError(f"{name}: there is no folder {path}")
    return [kind(Path(path)) for kind in PEERS[name]]
