"""The layer from its projection to its output, with one recorded plan per pass.

This module covers layers that share keys between branches and average windows. There kernels run
everything between `to_qkv` and `combine_heads`: rotary embedding, window means, selection, the
branches and their combination. The first call of a kind runs the operators and their checks one by
one. Later calls run one autograd node, which records and replays each of its two passes as a whole
(`kernels/common/replay.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from ... import blocks
from ...compat.transforms import is_plain, refuse_legacy_batched
from ...config import AttentionConfig
from ..call import Call
from . import compress, layer, rotary
from .operator import Operator

# differentiable inputs of the autograd node, in order
LEAVES = ("qkv", "branch_gates", "k_positions", "v_positions", "mem_k", "mem_v", "sinks")
TENSORS = (*LEAVES, "freqs")
FORMED = ("q", "k", "ck", "cv")  # saved for the backward, beside the layer's own tensors
NUMBERS = ("backend", "heads", "dim_head", "factor")
# the two plans, made at the first call, since that imports Triton
PASSES: dict[str, Any] = {}


def within(operator: Operator, config: AttentionConfig | None = None, **values: Any) -> Any:
    """Run an operator, without its dispatch if autograd is off."""
    if torch.is_grad_enabled():
        return operator(config, **values)
    return operator.run(operator.arguments.given(config, values))


def operands(at: SimpleNamespace, cq: Tensor, v: Tensor, formed: tuple[Tensor, ...]) -> Any:
    """The tensors and numbers of the operator `layer`."""
    q, k, ck, cv = formed
    heads: dict[str, Any] = dict(q=q, k=k, v=v, ck=ck, cv=cv, cq=cq)
    call = Call(
        **{name: t.transpose(1, 2) for name, t in heads.items()}, branch_gates=at.branch_gates,
        mem_k=at.mem_k, mem_v=at.mem_v, sinks=at.sinks, q_offset=0,
    )  # fmt: skip
    return layer.operands(call, at.config)


def forward(at: SimpleNamespace) -> list[Tensor]:
    """The output [B T H E], then tensors saved for the backward: `FORMED` and those of `layer`."""
    cq, raw_k, v = rotary.split(at.qkv, at.heads, at.dim_head)
    q, k = within(rotary.rotate, tensors=[cq, raw_k], freqs=at.freqs, start=0, factor=at.factor)
    l, d = at.config.compress_block_size, at.config.d
    windows = blocks.num_windows(raw_k.shape[2], d, causal=at.config.causal)
    positions = dict(k_positions=at.k_positions, v_positions=at.v_positions)
    ck, cv = within(compress.compress_mean, k=raw_k, v=v, **positions, l=l, d=d, windows=windows)
    formed = q, k, ck, cv
    out, *kept = within(layer.layer, at.config, **operands(at, cq, v, formed))
    return [out, *formed, *kept]


def backward(at: SimpleNamespace) -> list[Tensor]:
    """Gradients of the `LEAVES` that are not None; of the gates only with `recompute`."""
    cq, raw_k, v = rotary.split(at.qkv, at.heads, at.dim_head)
    values = operands(at, cq, v, at.formed)
    names = [n for n in layer.LEAVES if values[n] is not None]
    if not at.config.recompute:
        names.remove("branch_gates")
    values.pop("leaders")
    some = within(layer.layer_backward, at.config, **values, d_out=at.d_out, kept=at.kept)
    grads = dict(zip(names, some, strict=True))
    heads = {name: grads[name].transpose(1, 2) for name in ("q", "k", "v", "ck", "cv", "cq")}
    dk, dv, *d_positions = within(
        compress.compress_mean_backward, dck=heads["ck"], dcv=heads["cv"],
        k_positions=at.k_positions, v_positions=at.v_positions, l=at.config.compress_block_size,
        d=at.config.d, tokens=raw_k.shape[2],
    )  # fmt: skip
    dqkv = within(
        rotary.projected_heads_backward, dq=heads["q"], dcq=heads["cq"], dk=heads["k"], dck=dk,
        dv=heads["v"], dcv=dv, freqs=at.freqs, start=0, factor=-at.factor,
    )  # fmt: skip
    gates, *rest = (grads.get(name) for name in ("branch_gates", "mem_k", "mem_v", "sinks"))
    return [t for t in (dqkv, gates, *d_positions, *rest) if t is not None]


class ProjectedAttention(torch.autograd.Function):
    """`forward` and `backward` of this module, each from its recorded plan."""

    @staticmethod
    def forward(ctx: Any, at: SimpleNamespace, attend: Callable[[], Any], *tensors: Any) -> Any:
        out, *kept = attend()
        ctx.numbers = {name: getattr(at, name) for name in ("config", *NUMBERS)}
        ctx.save_for_backward(*(getattr(at, name) for name in TENSORS), *kept)
        ctx.set_materialize_grads(False)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        refuse_legacy_batched(*grads)
        saved = ctx.saved_tensors  # read once: activation checkpointing gives them only once
        at = SimpleNamespace(**dict(zip(TENSORS, saved, strict=False)), **ctx.numbers)
        kept = saved[len(TENSORS) :]
        at.formed, (indices, *kept) = kept[: len(FORMED)], kept[len(FORMED) :]
        at.d_out, d_gates = grads[0].contiguous(), None
        if kept:
            outs, lses = kept[:3], kept[3:]
            d_gates, *rest = layer.layer_backward_preprocess(
                d_out=at.d_out, outs=outs, lses=lses, branch_gates=at.branch_gates
            )
            kept = [*lses, *rest]
            # these are the last references to the branch outputs
            del saved, outs
            ctx.maybe_clear_saved_tensors()
        at.kept = [indices, *kept]
        if torch.is_grad_enabled():  # each operator then refuses second derivatives
            found = backward(at)
        else:
            with torch.cuda.device_of(at.d_out):
                found = PASSES["backward"](at, *given(at, TENSORS, "formed", "kept", "d_out"))
        named = {} if d_gates is None else {"branch_gates": d_gates}
        there = (n for n in LEAVES if getattr(at, n) is not None and n not in named)
        named |= dict(zip(there, found, strict=True))
        return None, None, *(named.get(name) for name in LEAVES)


def given(at: SimpleNamespace, names: tuple[str, ...], *others: str) -> tuple[list[Any], Any]:
    """The tensors of a call, and the settings and numbers that its launches depend on."""
    tensors = [getattr(at, name) for name in names]
    for name in others:
        value = getattr(at, name)
        tensors += value if isinstance(value, (list, tuple)) else [value]
    return tensors, (at.config, len(tensors), *(getattr(at, name) for name in NUMBERS))


def compile_first(
    at: SimpleNamespace, tensors: list[Any], trains: bool, possible: Callable[[], bool]
) -> None:
    """Compile the kernels of the first call of these settings, widths and power-of-two range of
    lengths."""
    shape = at.qkv.shape[1].bit_length(), at.qkv.shape[2], at.qkv.dtype, at.qkv.device
    there = tuple(t is None for t in tensors)
    kind = "projected", at.config, trains, at.heads, at.dim_head, shape, there
    if kind in layer.compiled or not possible():
        return

    def dry_run() -> None:
        out, *kept = forward(at)
        if trains:
            formed, (indices, *kept) = kept[: len(FORMED)], kept[len(FORMED) :]
            d_out = torch.empty_like(out)
            kept = [indices, *layer.preprocessed(kept, d_out, at.branch_gates)]
            backward(SimpleNamespace(**vars(at), formed=formed, kept=kept, d_out=d_out))

    layer.compile_kind(kind, dry_run)


def projected_attention(
    config: AttentionConfig, possible: Callable[[], bool], **values: Any
) -> Tensor | None:
    """The output [B T H E] of `qkv` [b n (h + 2 k) d] with `branch_gates`, positions of windows,
    memory, sinks and frequencies. None at the first call of a kind, if not `possible`, or if a
    hook or mode observes launches or dispatch."""
    from ...kernels.common import replay

    at = SimpleNamespace(config=config, **values)
    tensors, rest = given(at, TENSORS)
    if not is_plain(tensors) or not replay.is_possible(at.qkv):
        return None
    if not PASSES:
        PASSES.update(forward=replay.Repeated(forward), backward=replay.Repeated(backward))
    with torch.cuda.device_of(at.qkv):
        attend = PASSES["forward"].known(at, tensors, rest, possible)
        leaves = tensors[: len(LEAVES)]
        trains = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in leaves)
        if attend is None:
            if at.qkv.is_cuda:
                compile_first(at, tensors, trains, possible)
            return None
        if trains:
            return ProjectedAttention.apply(at, attend, *leaves)
        return attend()[0]
