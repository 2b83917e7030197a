"""Who computes attention, and how each is called: this library, PyTorch, and published packages."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import warnings
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention import flex_attention as flex

import native_sparse_attention as nsa
from native_sparse_attention.presets import preset

from . import oracle, problem
from .oracle import Branch
from .problem import Setting, Tensors


class Provider:
    """One way to compute one thing.

    names:        inputs, each of which gets a gradient
    part:         "whole", or the branch of ours that it is or stands against
    importance:   the rule whose ranking is checked
    factor:       of the error budget; peers get twice ours, for roundings that are their own
    """

    name = ""
    part = "whole"
    names: tuple[str, ...] = ("q", "k", "v")
    importance: str | None = None
    differentiable = True
    strided = False  # whether selection_stride means anything to it
    backend = "auto"  # of ours
    factor = 4.0
    note = ""
    refusal = "failed"  # the field of a row that says why it cannot run

    def sized(self, setting: Setting) -> Setting:
        """The setting with the provider's own sizes."""
        return setting

    def unfit(self, setting: Setting) -> str | None:
        """What of the setting it does not take, wherever it runs."""
        return None

    def why_not(self, setting: Setting, device: torch.device) -> str | None:
        """Why it cannot run here; None where it can be tried."""
        return self.unfit(setting)

    def prepare(self, x: Tensors, setting: Setting) -> None:
        """Put what a call needs besides its inputs into x, or replace inputs. Not timed."""

    def call(self, x: Tensors, setting: Setting) -> Tensor:
        raise NotImplementedError

    def branches(self, setting: Setting) -> list[Branch]:
        return []

    def indices(self, x: Tensors, setting: Setting) -> Tensor | None:
        """The blocks that the call selects, [1 T K n]."""
        return x.get("indices")

    def flops(self, setting: Setting) -> int:
        """Of the forward pass."""
        counts = [branch.count for branch in self.branches(setting)]
        return problem.attention_flops(setting, counts)


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

    name, strided, factor = "ours", True, 2.0
    names: tuple[str, ...] = ("q", "k", "v", "ck", "cv", "branch_gates")
    importance = "logits"

    def run(self, x: Tensors, setting: Setting, **options: Any) -> Any:
        options |= {name: x[name] for name in self.names}
        options |= dict(
            sliding_window_size=setting.w, importance=self.importance, backend=self.backend
        )
        return nsa.native_sparse_attention(**options, **setting.ranking)

    def call(self, x: Tensors, setting: Setting) -> Tensor:
        return self.run(x, setting)

    def indices(self, x: Tensors, setting: Setting) -> Tensor:
        with torch.no_grad():
            return self.run(x, setting, return_indices=True)[1]

    def branches(self, setting: Setting) -> list[Branch]:
        return our_branches(setting)

    def flops(self, setting: Setting) -> int:
        return super().flops(setting) + problem.scoring_flops(setting, str(self.importance))


class OursProbs(Ours):
    name, importance = "ours-probs", "probs"


class OursLarge(Ours):
    """Of queries so long that logits cannot be measured from a bound: a maximum is followed."""

    name, note = "ours-large", "q times 4"

    def prepare(self, x: Tensors, setting: Setting) -> None:
        x["q"] = (4 * x["q"].detach()).requires_grad_()


# of NSAConfig, by the names of a Setting
BLOCKS = dict(
    s="selection_block_size",
    n="num_selected_blocks",
    initial="num_initial_blocks",
    local="num_local_blocks",
)
THREE = BLOCKS | dict(
    l="compress_block_size", d="compress_block_sliding_stride", w="sliding_window_size"
)


SHORT_WINDOWS = "ours-short-windows"


class OursShortWindows(Ours):
    """At the sizes of `NSAConfig.preset("short-windows")`; those of a CPU stay."""

    name = SHORT_WINDOWS

    def sized(self, setting: Setting) -> Setting:
        sizes = preset("short-windows", setting.T)
        if setting.n < sizes["num_selected_blocks"]:
            return setting
        own: dict[str, Any] = {short: sizes[name] for short, name in THREE.items()}
        return dataclasses.replace(setting, **own)


@dataclasses.dataclass(frozen=True)
class Form:
    """One softmax over 1 initial, 8 local and 8 ranked blocks (fewer at the sizes of a CPU).

    windows:  l and d; windows are means of keys
    index:    ranked by queries of its own, one for each KV head, and by keys of one head
    preset:   the blocks of `NSAConfig.preset` for the length
    dense:    queries at positions below it see all of the past
    """

    importance: str
    windows: tuple[int, int]
    index: bool = False
    preset: bool = False
    dense: int = 0

    def sized(self, setting: Setting) -> Setting:
        (l, d), n = self.windows, min(8, setting.n)
        sizes: dict[str, Any] = dict(s=setting.s, n=n, initial=1, local=n)
        if self.preset and n == 8:
            blocks = preset("one-softmax", setting.T)
            sizes = {short: blocks[name] for short, name in BLOCKS.items()}
        return dataclasses.replace(setting, l=l, d=d, w=0, **sizes)

    def dense_length(self, setting: Setting) -> int:
        """`dense`, or half of a sequence at the sizes of a CPU."""
        return min(self.dense, setting.T // 2) if setting.n < 8 else self.dense


class OneSoftmax(Ours):
    """The selected branch alone."""

    names = ("q", "k", "v")

    def __init__(self, name: str, form: Form) -> None:
        self.name, self.importance, self.form = name, form.importance, form
        self.note = f"dense to {form.dense}" if form.dense else ""

    def sized(self, setting: Setting) -> Setting:
        return self.form.sized(setting)

    def prepare(self, x: Tensors, setting: Setting) -> None:
        c, keys = setting, x["k"].detach()
        if self.form.index:
            generator = torch.Generator(keys.device).manual_seed(1)
            given: Any = dict(generator=generator, device=keys.device, dtype=keys.dtype)
            x["cq"] = torch.randn(1, c.T, c.K, c.D, **given)
            keys = torch.randn(1, c.T, 1, c.D, **given)
        pooled = keys if c.l == 1 else problem.pooled(keys, c.l, c.d)
        x["ck"] = pooled.expand(-1, -1, c.K, -1)

    def run(self, x: Tensors, setting: Setting, **options: Any) -> Any:
        options |= dict(ck=x["ck"], cq=x.get("cq"), branches=("selected",))
        options["dense_length"] = self.form.dense_length(setting)
        return super().run(x, setting, **options)

    def branches(self, setting: Setting) -> list[Branch]:
        c, dense = setting, self.form.dense_length(setting)
        return [oracle.chosen(c.s, c.n, c.initial, c.local, dense=dense)]


# by its name here
ONE_SOFTMAX: dict[str, Form] = {
    "one-softmax": Form("logits", (32, 16)),
    "one-softmax-max4": Form("max", (4, 4)),
    "one-softmax-max": Form("max", (1, 1)),
    "one-softmax-index": Form("max", (32, 16), index=True),
    "one-softmax-preset": Form("max", (1, 1), preset=True),
    "one-softmax-preset, dense to 2k": Form("max", (1, 1), preset=True, dense=2048),
    "one-softmax-preset, dense to 4k": Form("max", (1, 1), preset=True, dense=4096),
    "one-softmax-preset, dense to 8k": Form("max", (1, 1), preset=True, dense=8192),
}


class OursCompressed(Provider):
    name, part, names, factor = "ours", "compressed", ("q", "ck", "cv"), 2.0

    def call(self, x: Tensors, setting: Setting) -> Tensor:
        inputs = [x[name] for name in self.names]
        options: dict[str, Any] = dict(
            compress_block_sliding_stride=setting.d, backend=self.backend
        )
        return nsa.compressed_attention(*inputs, **options)

    def branches(self, setting: Setting) -> list[Branch]:
        return [oracle.behind(setting.d)]


class OursSelect(Provider):
    """The ranking alone, which has no gradient here."""

    name, part, names, strided = "ours", "select", ("q", "ck"), True
    importance, differentiable = "logits", False

    def call(self, x: Tensors, setting: Setting) -> Tensor:
        q, ck = x["q"].detach(), x["ck"].detach()
        options: dict[str, Any] = dict(importance=self.importance, backend=self.backend)
        return nsa.select_blocks(q, ck, **options, **setting.ranking)

    def indices(self, x: Tensors, setting: Setting) -> Tensor:
        return self.call(x, setting)

    def flops(self, setting: Setting) -> int:
        return problem.scoring_flops(setting, str(self.importance))


class OursSelectProbs(OursSelect):
    name, importance = "ours-probs", "probs"


class OursSelected(Provider):
    """The selected branch for given indices: those of the ranking, or random ones of which `alike`
    neighbours share each draw."""

    name, part, strided, factor = "ours", "selected", True, 2.0

    def __init__(self, alike: int | None = None) -> None:
        self.alike = alike
        if alike is not None:
            self.note = f"random indices, {alike} neighbours alike"
            self.strided = False

    def prepare(self, x: Tensors, setting: Setting) -> None:
        if self.alike is not None:
            x["indices"] = problem.random_indices(setting, self.alike, x["q"].device)
            return
        q, ck = x["q"].detach(), problem.pooled(x["k"].detach(), setting.l, setting.d)
        x["indices"] = nsa.select_blocks(q, ck, **setting.ranking)

    def call(self, x: Tensors, setting: Setting) -> Tensor:
        options: dict[str, Any] = dict(selection_block_size=setting.s, backend=self.backend)
        q, k, v, indices = (x[name] for name in (*self.names, "indices"))
        return nsa.selected_attention(q, k, v, indices, **options, **setting.forced)

    def branches(self, setting: Setting) -> list[Branch]:
        return [oracle.chosen(setting.s, setting.n, setting.initial, setting.local)]


class OursWindow(Provider):
    name, part, factor = "ours", "window", 2.0

    def call(self, x: Tensors, setting: Setting) -> Tensor:
        inputs = [x[name] for name in self.names]
        options: dict[str, Any] = dict(sliding_window_size=setting.w, backend=self.backend)
        return nsa.sliding_window_attention(*inputs, **options)

    def branches(self, setting: Setting) -> list[Branch]:
        return [oracle.window(setting.w)]


# PyTorch


class Dense(Provider):
    """Causal attention to everything, by one backend of `scaled_dot_product_attention`."""

    def __init__(self, name: str, kernels: SDPBackend | None) -> None:
        self.name, self.kernels = name, kernels

    def why_not(self, setting: Setting, device: torch.device) -> str | None:
        if self.kernels is not None and device.type != "cuda":
            return f"{self.name} needs cuda"
        return None

    def prepare(self, x: Tensors, setting: Setting) -> None:
        """Repeat k and v for every query head where the backend takes no groups."""
        few = {n: x[n][:, :128].detach().requires_grad_() for n in self.names}
        self.note = "k, v by group"
        if setting.G == 1:
            return
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                self.call(few, setting).sum().backward()
        except RuntimeError:
            self.note = "k, v repeated for every head, before the timing"
            for name in ("k", "v"):
                repeated = x[name].detach().repeat_interleave(setting.G, 2)
                x[name] = repeated.requires_grad_()

    def call(self, x: Tensors, setting: Setting) -> Tensor:
        q, k, v = (x[name].transpose(1, 2) for name in self.names)
        grouped = q.shape[1] != k.shape[1]
        attend = functools.partial(F.scaled_dot_product_attention, is_causal=True)
        if self.kernels is None:
            return attend(q, k, v, enable_gqa=grouped).transpose(1, 2)
        with sdpa_kernel(self.kernels):
            return attend(q, k, v, enable_gqa=grouped).transpose(1, 2)

    def branches(self, setting: Setting) -> list[Branch]:
        return [oracle.window(None)]


class Flex(Provider):
    """flex_attention, compiled: dense, or the sliding window."""

    def __init__(self, part: str = "whole") -> None:
        self.name, self.part = ("flex-dense" if part == "whole" else "flex"), part

    def why_not(self, setting: Setting, device: torch.device) -> str | None:
        return None if device.type == "cuda" else "flex_attention has no gradients without cuda"

    @staticmethod
    @functools.cache
    def compiled() -> tuple[Any, Any]:
        return torch.compile(flex.flex_attention, dynamic=False), torch.compile(
            flex.create_block_mask
        )

    def prepare(self, x: Tensors, setting: Setting) -> None:
        reach = setting.T if self.part == "whole" else setting.w

        def causal(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return i >= j

        def window(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return (i >= j) & (i - j <= reach)

        seen = causal if self.part == "whole" else window
        self.mask = self.compiled()[1](seen, None, None, setting.T, setting.T, x["q"].device)

    def call(self, x: Tensors, setting: Setting) -> Tensor:
        q, k, v = (x[name].transpose(1, 2) for name in self.names)
        options = dict(block_mask=self.mask, enable_gqa=setting.G > 1)
        return self.compiled()[0](q, k, v, **options).transpose(1, 2)

    def branches(self, setting: Setting) -> list[Branch]:
        return [oracle.window(None if self.part == "whole" else setting.w)]


# published packages


def missing(module: str, distribution: str) -> str | None:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            importlib.import_module(module)
    except Exception as error:
        return f"{distribution} cannot be imported: {error}"
    return None


class FlashLinearAttention(Provider):
    """`fla.ops.nsa`: l = d = s, mean pooling inside, no window, selection by `probs` with the first
    and two local blocks among its n + 3."""

    name = "fla"
    names = ("q", "k", "v", "branch_gates")
    note = "d = l = s, no window, pooling included"

    def unfit(self, setting: Setting) -> str | None:
        if setting.G < 16 or setting.G & (setting.G - 1):
            return f"fla.ops.nsa takes groups of 16 heads and more, powers of two, not {setting.G}"
        if setting.T % setting.s:
            return f"its definition here wants T to be a multiple of {setting.s}"
        return None

    def why_not(self, setting: Setting, device: torch.device) -> str | None:
        if device.type != "cuda":
            return "flash-linear-attention needs cuda"
        reason = self.unfit(setting)
        return reason or missing("fla.ops.nsa.parallel", "flash-linear-attention")

    def blocks(self, setting: Setting) -> int:
        return setting.n + setting.initial + setting.local

    def call(self, x: Tensors, setting: Setting) -> Tensor:
        fla = importlib.import_module("fla.ops.nsa.parallel")
        cmp, sel, _ = x["branch_gates"].unbind(-1)
        options = dict(block_counts=self.blocks(setting), block_size=setting.s)
        return fla.parallel_nsa(x["q"], x["k"], x["v"], g_cmp=cmp, g_slc=sel, **options)

    def indices(self, x: Tensors, setting: Setting) -> Tensor:
        fla = importlib.import_module("fla.ops.nsa.parallel")
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
            "k",
            "v",
            lambda i, j, _: (j + 1) * s - 1 <= i,
            lambda i: (i + 1) // s,
            gate=0,
            pool=s,
        )
        return [pooled, oracle.chosen(s, blocks - 1, gate=1)]


class NsaPytorch(OursSelected):
    """The Triton kernel of native-sparse-attention-pytorch, the selected branch alone, for the
    blocks that ours attends to. It computes in fp16."""

    name, factor, strided = "nsa-pytorch", 4.0, False
    module = "native_sparse_attention_pytorch.triton_native_sparse_attention"

    def unfit(self, setting: Setting) -> str | None:
        fits = 16 % setting.G == 0 and setting.D <= 128
        return None if fits else "it takes groups that divide 16 and heads up to 128"

    def why_not(self, setting: Setting, device: torch.device) -> str | None:
        if device.type != "cuda":
            return "native-sparse-attention-pytorch needs cuda"
        return self.unfit(setting) or missing(self.module, "native-sparse-attention-pytorch")

    def prepare(self, x: Tensors, setting: Setting) -> None:
        super().prepare(x, setting)
        c = setting
        own = torch.arange(c.T, device=x["q"].device)[:, None] // c.s
        # its own block it adds itself; local blocks may also be initial ones
        local = own - torch.arange(1, c.local, device=own.device)
        local = local.masked_fill(local < c.initial, -1)
        initial = torch.arange(c.initial, device=own.device).expand(c.T, -1)
        initial = initial.masked_fill(initial >= own, -1)
        forced = torch.cat((initial, local), 1)[None, :, None].expand(-1, -1, c.K, -1)
        blocks = torch.cat((x["indices"].long(), forced), -1).transpose(1, 2).contiguous()
        x["blocks"], x["block_mask"] = blocks.clamp(min=0), blocks >= 0

    def call(self, x: Tensors, setting: Setting) -> Tensor:
        q, k, v = (x[name].transpose(1, 2) for name in self.names)
        attend = importlib.import_module(self.module).native_sparse_attend
        return attend(q, k, v, setting.s, x["blocks"], x["block_mask"]).transpose(1, 2)


def providers() -> dict[str, list[Provider]]:
    """By the name on the command line; those of "parts" are timed with --parts."""
    return {
        "dense-cudnn": [Dense("dense-cudnn", SDPBackend.CUDNN_ATTENTION)],
        "dense-flash": [Dense("dense-flash", SDPBackend.FLASH_ATTENTION)],
        "dense-sdpa": [Dense("dense-sdpa", None)],
        "flex-dense": [Flex()],
        "ours": [Ours()],
        "ours-probs": [OursProbs()],
        "ours-large": [OursLarge()],
        SHORT_WINDOWS: [OursShortWindows()],
        **{name: [OneSoftmax(name, form)] for name, form in ONE_SOFTMAX.items()},
        "fla": [FlashLinearAttention()],
        "nsa-pytorch": [NsaPytorch()],
        "parts": [
            OursCompressed(),
            OursSelect(),
            OursSelectProbs(),
            OursSelected(),
            OursWindow(),
            Flex("window"),
        ],
    }
