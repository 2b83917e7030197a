"""Who computes attention, and how each is called: this library, PyTorch, and published packages."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import warnings
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import native_sparse_attention as nsa

from . import common, oracle, problem
from .oracle import Branch
from .problem import Setting, Tensors


class Provider:
    """One way to compute one thing.

    names:        inputs, each of which gets a gradient
    importance:   the rule whose ranking is checked
    factor:       of the error budget; peers get twice ours, for roundings that are their own
    """

    name = ""
    names: tuple[str, ...] = ("q", "k", "v")
    importance: str | None = None
    strided = False  # whether selection_stride means anything to it
    devices: tuple[str, ...] = ("cpu", "cuda")
    factor = 4.0

    def sized(self, setting: Setting) -> Setting:
        """The setting with the provider's own sizes."""
        return setting

    def why_not(self, setting: Setting, device: torch.device) -> str | None:
        """Why it cannot run here; None where it can be tried."""
        return None if device.type in self.devices else f"{self.name} needs cuda"

    def prepare(self, x: Tensors, setting: Setting) -> None:
        """Put what a call needs besides its inputs into x, or replace inputs. Not timed."""

    def call(self, x: Tensors, setting: Setting) -> Tensor:
        raise NotImplementedError

    def branches(self, setting: Setting) -> list[Branch]:
        return []

    def indices(self, x: Tensors, setting: Setting) -> Tensor | None:
        """The blocks that the call selects, [1 T K n]."""
        return None


# this library


def our_branches(setting: Setting) -> list[Branch]:
    c = setting
    return [
        oracle.behind(c.d, gate=0),
        oracle.chosen(c.s, c.n, c.initial, c.local, gate=1),
        oracle.window(c.w, gate=2),
    ]


class Ours(Provider):
    """The whole of `native_sparse_attention` after compression."""

    strided, factor = True, 2.0
    names: tuple[str, ...] = ("q", "k", "v", "ck", "cv", "branch_gates")

    def __init__(self, name: str = "ours", importance: str = "logits") -> None:
        self.name, self.importance = name, importance

    def run(self, x: Tensors, setting: Setting, **options: Any) -> Any:
        options |= {name: x[name] for name in self.names}
        options |= dict(sliding_window_size=setting.w, importance=self.importance)
        return nsa.native_sparse_attention(**options, **setting.ranking)

    def call(self, x: Tensors, setting: Setting) -> Tensor:
        return self.run(x, setting)

    def indices(self, x: Tensors, setting: Setting) -> Tensor:
        with torch.no_grad():
            return self.run(x, setting, return_block_indices=True)[1]

    def branches(self, setting: Setting) -> list[Branch]:
        return our_branches(setting)


@dataclasses.dataclass(frozen=True)
class Form:
    """One softmax over 1 initial, 8 local and 8 ranked blocks (fewer at the sizes of a CPU).

    windows:  l and d; windows are means of keys
    groups:   that a first stage keeps by windows; their blocks rank by tokens
    bits:     of the numbers that rank
    index:    ranked by queries of its own, one for each KV head, and by keys of one head
    """

    importance: str
    windows: tuple[int, int]
    index: bool = False
    groups: int = 0
    bits: int = 16

    def sized(self, setting: Setting) -> Setting:
        (l, d), n = self.windows, min(8, setting.n)
        local = max(4, n // 4 * 4) if self.groups else n
        sizes: dict[str, Any] = dict(s=setting.s, n=n, initial=1, local=local)
        groups = min(self.groups, setting.n)
        sizes |= dict(groups=groups, bits=self.bits)
        return dataclasses.replace(setting, l=l, d=d, w=0, **sizes)


class OneSoftmax(Ours):
    """The selected branch alone."""

    names = ("q", "k", "v")

    def __init__(self, name: str, form: Form) -> None:
        super().__init__(name, form.importance)
        self.form, self.strided = form, form.groups == 0

    def sized(self, setting: Setting) -> Setting:
        return self.form.sized(setting)

    def prepare(self, x: Tensors, setting: Setting) -> None:
        c, keys = setting, x["k"].detach()
        if self.form.index:
            generator = torch.Generator(keys.device).manual_seed(1)
            like: Any = dict(generator=generator, device=keys.device, dtype=keys.dtype)
            x["cq"] = torch.randn(1, c.T, c.K, c.D, **like)
            keys = torch.randn(1, c.T, 1, c.D, **like)
        pooled = keys if c.l == 1 else problem.pooled(keys, c.l, c.d)
        x["ck"] = pooled.expand(-1, -1, c.K, -1)

    def run(self, x: Tensors, setting: Setting, **options: Any) -> Any:
        options |= dict(ck=x["ck"], cq=x.get("cq"), branches=("selected",))
        return super().run(x, setting, **options)

    def branches(self, setting: Setting) -> list[Branch]:
        return [oracle.chosen(setting.s, setting.n, setting.initial, setting.local)]


ONE_SOFTMAX: dict[str, Form] = {
    "one-softmax": Form("logits", (32, 16)),
    "one-softmax-max4": Form("max", (4, 4)),
    "one-softmax-max": Form("max", (1, 1)),
    "one-softmax-heads": Form("head_max", (1, 1), bits=8),
    "one-softmax-index": Form("max", (32, 16), index=True),
    "one-softmax-stages": Form("max", (16, 16), groups=16),
}


# PyTorch


class Dense(Provider):
    """Causal attention to everything, by one backend of `scaled_dot_product_attention`."""

    def __init__(self, name: str, kernels: SDPBackend | None) -> None:
        self.name, self.kernels = name, kernels
        self.devices = ("cuda",) if kernels is not None else ("cpu", "cuda")

    def call(self, x: Tensors, setting: Setting) -> Tensor:
        q, k, v = (x[name].transpose(1, 2) for name in self.names)
        with sdpa_kernel(self.kernels) if self.kernels is not None else contextlib.nullcontext():
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=setting.G > 1)
        return out.transpose(1, 2)

    def branches(self, setting: Setting) -> list[Branch]:
        return [oracle.window(None)]


# published packages


class FlashLinearAttention(Provider):
    """`fla.ops.nsa`: l = d = s, mean pooling inside, no window, selection by `probs` with the first
    and two local blocks among its n + 3."""

    name, module, devices = "fla", "fla.ops.nsa.parallel", ("cuda",)
    names = ("q", "k", "v", "branch_gates")

    def why_not(self, setting: Setting, device: torch.device) -> str | None:
        if setting.G < 16 or setting.G & (setting.G - 1):
            return f"fla.ops.nsa takes groups of 16 heads and more, powers of two, not {setting.G}"
        if setting.T % setting.s:
            return f"its definition here wants T to be a multiple of {setting.s}"
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                importlib.import_module(self.module)
        except Exception as error:  # of a package, of any kind
            return f"{self.module} cannot be imported: {common.why(error)}"
        return super().why_not(setting, device)

    def blocks(self, setting: Setting) -> int:
        return setting.n + setting.initial + setting.local

    def call(self, x: Tensors, setting: Setting) -> Tensor:
        fla = importlib.import_module(self.module)
        cmp, sel, _ = x["branch_gates"].unbind(-1)
        options = dict(block_counts=self.blocks(setting), block_size=setting.s)
        return fla.parallel_nsa(x["q"], x["k"], x["v"], g_cmp=cmp, g_slc=sel, **options)

    def indices(self, x: Tensors, setting: Setting) -> Tensor:
        fla = importlib.import_module(self.module)
        options = dict(block_size=setting.s, scale=setting.D**-0.5)
        with torch.no_grad():
            q, T = x["q"], setting.T
            k, v = (fla.mean_pooling(x[name], setting.s) for name in ("k", "v"))
            _, lse = fla.parallel_nsa_compression(q=q, k=k, v=v, TK=T, **options)
            counts = self.blocks(setting)
            return fla.parallel_nsa_topk(q=q, k=k, TK=T, lse=lse, block_counts=counts, **options)

    def branches(self, setting: Setting) -> list[Branch]:
        s, blocks = setting.s, self.blocks(setting)
        # a window counts from its own last token on
        pooled = Branch(
            "k", "v", lambda i, j, _: (j + 1) * s - 1 <= i, lambda i: (i + 1) // s, gate=0, pool=s
        )
        return [pooled, oracle.chosen(s, blocks - 1, gate=1)]


def providers() -> dict[str, Provider]:
    """By the name on the command line."""
    return {
        "dense-cudnn": Dense("dense-cudnn", SDPBackend.CUDNN_ATTENTION),
        "dense-flash": Dense("dense-flash", SDPBackend.FLASH_ATTENTION),
        "dense-sdpa": Dense("dense-sdpa", None),
        "ours": Ours(),
        "ours-probs": Ours("ours-probs", "probs"),
        **{name: OneSoftmax(name, form) for name, form in ONE_SOFTMAX.items()},
        "fla": FlashLinearAttention(),
    }
