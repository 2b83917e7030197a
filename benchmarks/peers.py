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
            raise ImportError(f"{loaded.__name__} was imported from elsewhere")
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
    local = local.masked_fill(local < c.initial, none)
    forced = torch.cat((initial.masked_fill(initial > own, none), local), 1)
    ranked = indices[0].masked_fill(indices[0] < 0, none).int()
    forced = forced[:, None].expand(-1, c.K, -1).int()
    return torch.cat((ranked, forced), -1).sort(-1).values.transpose(0, 1).contiguous()


class FlashNsa(Peer):
    """After compression, as "ours" is: its own ranking and branches, gated; no window, which needs
    flash_attn. Its settings are those of a global class."""

    name, module, source = "flash_nsa", "flash_nsa", "mdy666/Scalable-Flash-Native-Sparse-Attention"
    names = ("q", "k", "v", "ck", "cv", "branch_gates")
    computes = "ranking by probs, compressed and selected branch, gated; no window"

    def unfit(self, setting: Setting) -> str | None:
        c = setting
        for name, value in {"d": c.d, "s": c.s, "D": c.D}.items():
            if value & (value - 1):
                return f"{self.name} takes powers of two for {name}, not {value}"
        if c.l % c.d or c.s % c.d:
            return f"{self.name} takes l and s that are multiples of d"
        return super().unfit(setting)

    def prepare(self, x: Tensors, setting: Setting) -> None:
        c, helper = setting, self.load().NSAHelper
        helper.set_hyperparameters(
            kernel_size=c.l, stride=c.d, block_size=c.s, window_size=c.w,
            top_n=c.n + c.initial + c.local, num_init_blocks=c.initial, num_local_blocks=c.local,
        )  # fmt: skip
        # offsets that it has seen it does not set up again, whatever the settings
        helper.x_cu_seqlens = None
        helper.init_cu_seqlens(cu_seqlens(setting, x["q"].device))
        # ours begin with the windows that reach before token 0; it has none of them
        for name in {"ck", "cv"} & x.keys():
            x[name] = x[name].detach()[:, c.l // c.d - 1 :].contiguous().requires_grad_()

    def compressed(self, x: Tensors, setting: Setting) -> tuple[Tensor, Tensor]:
        """The compressed branch, and the blocks [K T top_n] of the ranking."""
        flash, scale = self.load(), setting.D**-0.5
        q, ck, cv = (row(x[name]) for name in ("q", "ck", "cv"))
        out, lse = flash.compress_attn(q, ck, cv, sm_scale=scale)
        options = dict(sm_scale=scale, maybe_efficient_version=True, scale_slc_p=True)
        return out, flash.slc_topk_indices(q, ck, lse, **options)[0]

    def call(self, x: Tensors, setting: Setting) -> Tensor:
        q, k, v, gates = (row(x[name]) for name in ("q", "k", "v", "branch_gates"))
        compressed, blocks = self.compressed(x, setting)
        selected = self.load().select_attn(q, k, v, blocks, sm_scale=setting.D**-0.5)
        return (gates[..., :1] * compressed + gates[..., 1:2] * selected)[None]

    def indices(self, x: Tensors, setting: Setting) -> Tensor:
        with torch.no_grad():
            blocks = self.compressed(x, setting)[1].transpose(0, 1)
        slot = torch.arange(blocks.shape[-1], device=blocks.device)
        own = torch.arange(setting.T, device=blocks.device)[:, None, None] // setting.s
        return blocks.masked_fill((slot > own) | (blocks > own), -1)[None].int()

    def branches(self, setting: Setting) -> list[Branch]:
        c = setting
        # windows `[j d, j d + l)` of which the query sees the last token
        ended = Branch(
            "ck", "cv", lambda i, j, _: j * c.d + c.l - 1 <= i,
            lambda i: ((i + 1 - c.l) // c.d + 1).clamp(min=0), gate=0,
        )  # fmt: skip
        # all of its top_n blocks are in the indices, the query's own among them
        return [ended, oracle.chosen(c.s, c.n + c.initial + c.local - 1, gate=1)]

    def flops(self, setting: Setting) -> int:
        return super().flops(setting) + problem.scoring_flops(setting, "probs")


class Fsa(Peer, OursSelected):
    """Key-major selected attention, for small groups, with the blocks of this library's ranking."""

    name, module, source = "fsa", "fsa.ops", "Relaxed-System-Lab/Flash-Sparse-Attention"
    computes = "the selected branch"
    strided, alike = False, None

    def unfit(self, setting: Setting) -> str | None:
        if setting.s not in (32, 64, 128, 256):
            return f"fsa takes blocks of 32, 64, 128 or 256 tokens, not {setting.s}"
        return super().unfit(setting)

    def prepare(self, x: Tensors, setting: Setting) -> None:
        OursSelected.prepare(self, x, setting)
        blocks = every_block(x["indices"], setting)
        x["blocks"] = blocks.masked_fill(blocks == -(-setting.T // setting.s), -1)
        x["cu_seqlens"] = cu_seqlens(setting, blocks.device)

    def call(self, x: Tensors, setting: Setting) -> Tensor:
        q, k, v = (row(x[name]) for name in self.names)
        attend = self.load().FSA_topk_sparse_attention
        return attend(q, k, v, x["blocks"], setting.s, x["cu_seqlens"], setting.D**-0.5)[None]


PEERS: dict[str, tuple[type[Peer], ...]] = {
    "flash_nsa": (FlashNsa,), "fsa": (Fsa,),
}  # fmt: skip


def checkout(text: str) -> list[Peer]:
    """The adapters of NAME=PATH on the command line."""
    name, _, path = text.partition("=")
    if name not in PEERS or not path:
        known = ", ".join(PEERS)
        raise argparse.ArgumentTypeError(f"expected NAME=PATH, NAME one of {known}, got {text!r}")
    if not Path(path).is_dir():
        raise argparse.ArgumentTypeError(f"{name}: there is no folder {path}")
    return [kind(Path(path)) for kind in PEERS[name]]
