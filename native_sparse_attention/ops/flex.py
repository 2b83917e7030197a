"""The three branches on torch's flex_attention: compiled on CUDA, unfused on the CPU. Layouts and
arguments are as in `functional.py`."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import blocks
from ..checks import check_block_mask
from ..compat import cast_to_autocast_dtype, no_autocast
from ..config import AttentionConfig
from ..masks import gallery, nsa
from .call import Call, needs_gradient
from .chunked import select_blocks as select_blocks
from .reference import prepend_memory, upcast, visible_windows

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

# smallest head width of torch's CUDA kernels
MIN_WIDTH = 16

# shapes that one compiled function may see. Lengths become symbolic at the second shape, but dynamo
# always compiles a length, batch or number of tiles of 1 separately
RECOMPILE_LIMIT = 256


def why_not(op: str, call: Any, config: AttentionConfig) -> list[str]:
    """Reasons why flex_attention cannot run this call; empty if it can."""
    if op in ("select_blocks", "decode_attention"):
        return [f"flex_attention has no form of {op}"]
    q, k, v = call.q, call.k, call.v
    reasons = []
    if q.device.type not in ("cuda", "cpu"):
        reasons.append(f"q is on {q.device.type}, needs cuda or cpu")
    if q.is_cuda:
        if torch.compiler.is_compiling():
            # torch 2.11: under no_grad, and under activation checkpointing
            reasons.append("inside a larger compiled graph its lowering may fail")
        if q.dtype == torch.float64:
            reasons.append("its CUDA kernels have no float64")
        for name, t in (("q", q), ("v", v)):
            if t is not None and t.shape[-1] < MIN_WIDTH:
                reasons.append(f"{name} has head width {t.shape[-1]}, needs at least {MIN_WIDTH}")
    elif needs_gradient((q, k, v)):
        reasons.append(f"it has no gradients on {q.device.type}")
    if isinstance(call.q_offset, Tensor):
        reasons.append("q_offset is a tensor, and its masks need one offset for all rows")
    if call.gates is not None or (config.ranks and config.use_diff_topk):
        reasons.append(
            "it cannot scale logits by gates and differentiate them (use_diff_topk=True)"
        )
    if 0 in q.shape:
        reasons.append(f"q is empty, {list(q.shape)}")
    elif 0 in k.shape and op != "compressed_attention":
        reasons.append(f"k is empty, {list(k.shape)}")
    return reasons


def attend(
    q: Tensor, k: Tensor, v: Tensor, block_mask: BlockMask | None, scale: float | None,
    soft_cap: float | None, return_lse: bool,
) -> Any:  # fmt: skip
    """flex_attention on [B H T D]: the output, and its log-sum-exp on request."""
    # not at import: it loads sympy, which takes 1 s
    from torch.nn.attention import flex_attention as flex

    options: dict[str, Any] = {"block_mask": block_mask, "scale": scale}
    options["enable_gqa"] = q.shape[1] != k.shape[1]
    if q.is_cuda and q.shape[2] > 1:
        # torch's kernels of short queries have no tile for some symbolic lengths
        options["kernel_options"] = {"FORCE_USE_FLEX_ATTENTION": True}
        if q.dtype == torch.float32 and q.shape[3] > 128:  # its tiles are too large but for 256
            options["kernel_options"] |= {"fwd_BLOCK_M": 32, "fwd_BLOCK_N": 32}
    if soft_cap is not None:
        options["score_mod"] = gallery.soft_cap(soft_cap)
    if not return_lse:
        return flex.flex_attention(q, k, v, **options)
    if hasattr(flex, "AuxRequest"):
        out, aux = flex.flex_attention(q, k, v, return_aux=flex.AuxRequest(lse=True), **options)
        return out, aux.lse
    # torch 2.8
    return flex.flex_attention(q, k, v, return_lse=True, **options)


@cache
def compiled_attend() -> Callable[..., Any]:
    """`attend`, compiled at first use. At the limit of recompilations dynamo raises; it does not
    fall back to unfused T x S scores."""
    return torch.compile(attend, fullgraph=True)


def compressed_keys(call: Call, config: AttentionConfig) -> Any:
    """Memory [K m D], always visible, and windows k, v [B W K D]. Causally query i sees window j
    iff `j < i // d`; otherwise it sees every window."""
    q, k, v, documents = call.q, call.k, call.v, call.documents
    T, d, num_mem = q.shape[1], config.d, 0 if call.mem_k is None else call.mem_k.shape[1]
    if num_mem:
        k, v = (prepend_memory(m.to(x.dtype), x) for m, x in ((call.mem_k, k), (call.mem_v, v)))
    kv_len, block_mask = k.shape[1], None
    if kv_len == 0:
        # flex_attention needs a key: add one that no query sees
        k, v = F.pad(k, (0, 0, 0, 0, 0, 1)), F.pad(v, (0, 0, 0, 0, 0, 1))
        block_mask = nsa.sliding_block_mask(T, 1, 0, True, 1, q.device)
    elif documents is not None:
        i = torch.arange(call.q_offset, call.q_offset + T, device=q.device)
        bounds = visible_windows(i, kv_len - num_mem, d, config.causal, documents)
        block_mask = nsa.range_block_mask(*bounds, kv_len, num_mem)
    elif config.causal:
        block_mask = nsa.compress_block_mask(T, kv_len, d, num_mem, call.q_offset, q.device)
    return k, v, block_mask


def selected_keys(call: Call, config: AttentionConfig) -> Any:
    """The tokens of selected and forced blocks: block_indices [B T K|H n] with -1 for none, initial
    blocks and, causally, local blocks. Causally no query sees a key after itself."""
    q, documents, causal, indices = call.q, call.documents, config.causal, call.block_indices
    if call.fine_selection_flex_mask is not None:
        return call.k, call.v, fine_block_mask(call, config)
    T, S, s = q.shape[1], call.k.shape[1], config.selection_block_size
    num_blocks = blocks.num_blocks(S, s)
    membership = nsa.block_membership(indices, num_blocks, config, call.q_offset, documents)
    if causal:
        ends = torch.arange(call.q_offset, call.q_offset + T, device=q.device)[None] + 1
    elif documents is None:
        ends = torch.full((1, T), S, device=q.device)
    else:
        ends = documents.last
    groups = q.shape[2] // indices.shape[2]
    return call.k, call.v, nsa.selected_block_mask(membership, ends, S, s, groups)


def fine_block_mask(call: Call, config: AttentionConfig) -> BlockMask:
    """The user's `mask(indices [b r i n], num_grouped_queries)`, of `create_fine_mask` or of
    others. It does not know the forced blocks, so it gets them as selected blocks. An empty slot
    repeats a block that the query reads, since masks of others know no -1."""
    T, s, causal = call.q.shape[1], config.selection_block_size, config.causal
    if causal and config.num_local_blocks == 0:
        raise NotImplementedError(
            "fine_selection_flex_mask always holds a query's own block, but num_local_blocks=0"
        )
    device, num_blocks = call.q.device, blocks.num_blocks(T, s)
    own_block = torch.arange(T, device=device)[:, None] // s
    forced = torch.arange(min(config.num_initial_blocks, num_blocks), device=device).expand(T, -1)
    if causal:
        forced = forced.masked_fill(forced > own_block, -1)
        previous = own_block - torch.arange(1, config.num_local_blocks, device=device)
        forced = torch.cat((forced, previous.clamp(min=-1)), dim=-1)
    indices = call.block_indices.transpose(1, 2).long()
    indices = torch.cat((indices, forced.expand(*indices.shape[:2], -1, -1)), dim=-1)
    if indices.shape[-1]:
        read = own_block if causal else indices.amax(dim=-1, keepdim=True)
        indices = torch.where(indices < 0, read, indices)
    groups = call.q.shape[2] // indices.shape[1]
    mask: BlockMask = call.fine_selection_flex_mask(indices, num_grouped_queries=groups)
    check_block_mask("what fine_selection_flex_mask returns", mask, "create_fine_mask")
    return mask


def window_keys(call: Call, config: AttentionConfig) -> Any:
    """Keys `i - w .. i`, or `i - w .. i + w` if not causal."""
    q, k, v, documents, start = call.q, call.k, call.v, call.documents, call.q_offset
    if call.sliding_window_flex_mask is not None:
        return k, v, call.sliding_window_flex_mask
    T, S, max_past = q.shape[1], k.shape[1], config.sliding_window_size
    max_future = 0 if config.causal else max_past
    if documents is not None:
        i = torch.arange(start, start + T, device=q.device)
        lo, hi = documents.first.maximum(i - max_past), documents.last.minimum(i + 1 + max_future)
        return k, v, nsa.range_block_mask(lo, hi, S)
    # drop keys that no query sees, so that every step of a long decode has one shape
    first, last = max(0, start - max_past), min(S, start + T + max_future)
    k, v, offset = k[:, first:last], v[:, first:last], start - first
    return k, v, nsa.sliding_block_mask(T, last - first, max_past, config.causal, offset, q.device)


# the keys and values that queries see, and the block mask
KEYS = {"compressed": compressed_keys, "selected": selected_keys, "window": window_keys}


def attend_branch(call: Call, config: AttentionConfig, return_lse: bool = False) -> Any:
    if call.has_masks() and (reasons := why_not("attention", call, config)):
        raise NotImplementedError(
            f"flex_attention cannot run a given mask: {'; '.join(reasons)}. Leave the mask out to "
            "let the backend choose."
        )
    k, v, block_mask = KEYS[config.branches[0]](call, config)
    q, k, v = cast_to_autocast_dtype(*(t.transpose(1, 2) for t in (call.q, k, v)))
    dtype = v.dtype
    sinks = None if call.sinks is None else call.sinks[0]
    settings = block_mask, config.scale, config.soft_cap, return_lse or sinks is not None
    if torch.compiler.is_compiling():
        result = attend(q, k, v, *settings)
    elif q.is_cuda:
        with torch._dynamo.config.patch(recompile_limit=RECOMPILE_LIMIT):
            result = compiled_attend()(q, k, v, *settings)
    else:  # on the CPU, uncompiled and in fp32 or better
        if not torch.is_grad_enabled():
            # flex checks `requires_grad` of tensors, not whether autograd records
            q, k, v = q.detach(), k.detach(), v.detach()
        with warnings.catch_warnings(), no_autocast(q.device.type):
            warnings.filterwarnings("ignore", "flex_attention called without torch.compile")
            q, k, v = upcast(q, k, v)
            result = attend(q, k, v, *settings)
    out, lse = result if isinstance(result, tuple) else (result, None)
    out = out.to(dtype).transpose(1, 2)
    if lse is None:
        return out
    lse = lse.transpose(1, 2)
    if sinks is not None:
        sinks = sinks.to(lse.dtype)
        out = (out * (lse - sinks).sigmoid()[..., None]).to(out.dtype)
        lse = torch.logaddexp(lse, sinks)
    return (out, lse) if return_lse else out
