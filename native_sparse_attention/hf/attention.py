"""The attention function that transformers calls for each layer.

B  batch            T  query tokens          S  key tokens, past ones included
H  query heads      K  KV heads              D  head dimension
L  keys that are written, of S               l, d  tokens of a window, and from window to window
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from .. import varlen
from ..checks.scalars import TOO_LARGE, shown
from ..compat.sdpa import sdpa
from ..compress import windows_of
from ..config import SELECTION, AttentionConfig
from ..ops import branches, decode, dispatch
from ..ops.call import Call
from ..ops.functional import sliding_window_attention
from ..ops.nsa import choose_backend, native_sparse_attention
from ..ops.triton.backend import why_not
from . import masks
from .cache import Kept, kept_with, means_with
from .masks import CONVERTED, LAYOUTS, OVER, STARTS, remembered
from .settings import settings_of

# most new tokens per sequence of the decode kernels
MAX_NEW = 16
# the greatest `dense_length`
ANY_LENGTH = TOO_LARGE - 1


def attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    sliding_window: int | None = None,
    s_aux: Tensor | None = None,
    is_causal: bool | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """One softmax over the initial, local and ranked blocks of each query, as `AttentionInterface`
    asks for it; over its window in a layer that has one.

    Args:
        query: [B, H, T, D], with positions applied.
        key, value: [B, K, S, D] and [B, K, S, E], with positions applied.
        attention_mask: of `sparse_mask`, or of the user, [B, 1, T, S].
        softcap, s_aux: the soft cap of logits; a sink [H] for each query head.
        sliding_window: tokens that a query of this layer sees, its own included.

    Returns:
        [B, T, H, E] and None. The output of padding is 0.

    Raises:
        ValueError: a mask of another form, dropout, weights asked for, or no causal attention.
    """
    check_call(module, dropout, is_causal, others)
    settings = settings_of(module.config)
    query, keys, value = of_one_dtype(query, key, value)
    extra: dict[str, Any] = dict(scale=scaling, soft_cap=softcap)
    mask, (B, _, T, _), S = attention_mask, query.shape, keys.shape[2]
    position_ids = others.get("position_ids")
    is_own = mask is None or masks.is_own(mask, S)  # None: `packed` may find one
    if mask is None and S == T:
        mask = packed(position_ids, B, T)
    elif sliding_window is None and (mask is None or len(mask) == 0):
        check_one_document(position_ids, T, S if mask is None else mask.shape[-1])
    elif mask is not None and is_own:
        mask = masks.received(mask, S)
    plain = mask is None and sliding_window is None and s_aux is None and softcap is None
    if plain and dense_up_to(settings) >= S:
        rows = (t.transpose(1, 2) for t in (query, keys))
        backend = dispatch.choose(settings["backend"], "native_sparse_attention", *rows)
        out = branches.attend_sdpa(query, keys, value, True, scaling, backend)
        if out is not None:
            return out.transpose(1, 2).contiguous(), None
    q, k, v = (t.transpose(1, 2) for t in (query, keys, value))
    if sliding_window is not None:
        sinks = None if s_aux is None else s_aux.to(q.dtype)
        call = q, k, v, mask, sliding_window, sinks
        if mask is None or is_own:
            return within_window(*call, settings["backend"], extra).contiguous(), None
        return under_mask(q, k, v, mask, sinks, **extra).contiguous(), None
    if s_aux is not None:
        extra["sinks"] = s_aux.to(q.dtype)[None]
    return sparsely(q, k, v, mask, is_own, key, settings, extra).contiguous(), None


def sparsely(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    is_own: bool,
    key: Tensor,
    settings: dict[str, Any],
    extra: dict[str, Any],
) -> Tensor:
    """`attention` in a layer without a window, by the kind of mask."""
    if mask is not None and not is_own:
        mask = remembered(CONVERTED, mask, masks.converted, (q.shape[0], q.shape[1], k.shape[1]))
    if mask is not None and len(mask) == 0:  # a static cache is longer than its sequences
        k, v, mask = k[:, : mask.shape[-1]], v[:, : mask.shape[-1]], None
    if mask is None:
        return at_end(q, k, v, key, settings, extra)
    if mask.dtype == torch.int64:
        starts = (mask[:1].flatten() - q.shape[1]).expand(q.shape[0])
        least = settings["dense_length"] if mask.shape[0] == 2 else 0
        return over_storage(q, k, v, starts, least, None, settings, extra, key)
    k, v = k[:, : mask.shape[-1]], v[:, : mask.shape[-1]]
    if k.shape[1] == q.shape[1]:
        return over_documents(q, k, v, mask, settings, extra)
    return over_padded_storage(q, k, v, mask, settings, extra)


def packed(position_ids: Any, B: int, T: int) -> Tensor | None:
    """The mask of packed documents where transformers has not looked for them, as with a cache."""
    if not are_readable(position_ids, T):
        return None
    return remembered(CONVERTED, position_ids, masks.of_positions, (B,))


def are_readable(position_ids: Any, T: int) -> bool:
    if torch.compiler.is_compiling() or not isinstance(position_ids, Tensor):
        return False
    return position_ids.ndim == 2 and position_ids.shape[1] == T


def check_one_document(position_ids: Any, T: int, count: int) -> None:
    """Check that no document begins among T queries, the last of `count` tokens of a cache."""
    past = count - T
    if T == 1 or not are_readable(position_ids, T):
        return
    if remembered(OVER, position_ids, masks.begin_again, (past > 0,)):
        raise ValueError(
            f"position_ids over a cache must not return to 0 after {past} tokens, got "
            f"{shown(position_ids.tolist())}: a cache keeps no packed sequences, give "
            "use_cache=False"
        )


def check_call(module: Any, dropout: float, is_causal: bool | None, others: dict[str, Any]) -> None:
    if dropout:
        raise ValueError(
            f"attention_dropout must be 0 with sparse attention, got {dropout}: set "
            "model.config.attention_dropout and that of the attention modules, or model.eval()"
        )
    if others.get("output_attentions"):
        raise ValueError(
            "output_attentions must be False with sparse attention, which forms no weights, "
            "got True: use_dense_attention(model) first, with attn_implementation='eager'"
        )
    if others.get("position_bias") is not None:
        raise ValueError("position_bias must be None with sparse attention, got a bias of logits")
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    if not causal:
        raise ValueError(
            f"is_causal must be True with sparse attention, got False in {type(module).__name__}"
        )


def of_one_dtype(*tensors: Tensor) -> list[Tensor]:
    """Heads [B H T D] of one dtype: under autocast its own, else that of values."""
    device = tensors[0].device.type
    dtype = tensors[-1].dtype
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
    return [t if t.dtype == dtype else t.to(dtype) for t in tensors]


# layers with a window of their own


def within_window(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    sliding_window: int,
    sinks: Tensor | None,
    backend: str,
    extra: dict[str, Any],
) -> Tensor:
    """Attention to the last `sliding_window` keys, with an own mask of tokens."""
    if mask is not None and mask.shape[-1] != q.shape[1]:  # the model has left out queries
        visible = masks.within_window(mask, q.shape[1], k.shape[1], sliding_window)
        return under_mask(q, k, v, visible, sinks, **extra)
    settings: dict[str, Any] = dict(
        sliding_window_size=sliding_window - 1, sinks=sinks, backend=backend, **extra
    )
    if mask is None:
        return sliding_window_attention(q, k, v, **settings)
    layout = remembered(LAYOUTS, mask, layout_of, (1,))
    q, k, v = (layout.spread(t) for t in (q, k, v))
    return layout.collect(sliding_window_attention(q, k, v, documents=layout.documents, **settings))


def under_mask(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor,
    sinks: Tensor | None,
    *,
    scale: float | None,
    soft_cap: float | None,
) -> Tensor:
    """Attention under a mask [B, 1, T, S]: the few keys of a window's cache, or the user's."""
    mask = mask.to(q.dtype) if mask.is_floating_point() else mask != 0
    groups = q.shape[2] // k.shape[2]
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    if sinks is None and soft_cap is None:
        out = sdpa(q, k, v, attn_mask=mask, scale=scale, enable_gqa=groups > 1)
        return out.transpose(1, 2)
    k, v = (t.repeat_interleave(groups, dim=1) for t in (k, v))
    logits = (q @ k.mT).float() * (q.shape[-1] ** -0.5 if scale is None else scale)
    if soft_cap is not None:
        logits = soft_cap * torch.tanh(logits / soft_cap)
    least = torch.finfo(logits.dtype).min / 2  # finite: a row of padding has no NaN
    if mask.is_floating_point():
        logits = logits + mask.float().clamp(min=least)
    else:
        logits = logits.masked_fill(~mask, least)
    if sinks is not None:
        sink = sinks.float()[:, None, None].expand(*logits.shape[:-1], 1)
        logits = torch.cat((logits, sink), dim=-1)
    weights = logits.softmax(dim=-1)[..., : k.shape[2]]
    return (weights.to(v.dtype) @ v).transpose(1, 2)


# layers that attend sparsely


def selection_of(settings: dict[str, Any]) -> dict[str, Any]:
    """The settings that functions take."""
    names = (*SELECTION, "dense_length", "backend")
    return {name: settings[name] for name in names} | dict(
        branches=("selected",), sliding_window_size=0
    )


def compressed_keys(
    k: Tensor, settings: dict[str, Any], documents: varlen.Documents | None = None
) -> Tensor | None:
    """The keys [B W K D] that rank blocks: means of windows of k [B S K D], or k itself."""
    l, d = settings["compress_block_size"], settings["compress_block_sliding_stride"]
    if settings["num_selected_blocks"] == 0:
        return None
    if l == d == 1:
        return k
    windows = windows_of(k.transpose(1, 2), l, d, True, documents)
    return windows.mean(dim=-2).transpose(1, 2)


def kept_means(key: Tensor | None, k: Tensor, settings: dict[str, Any]) -> Tensor | None:
    """`compressed_keys` of a whole static cache, from a `StaticSparseCache` where it is one."""
    l, d = settings["compress_block_size"], settings["compress_block_sliding_stride"]
    kept = None
    if key is not None and settings["num_selected_blocks"]:
        kept = means_with(key, l, d)
    if kept is None:
        return compressed_keys(k, settings)
    return kept if kept.dtype == k.dtype else kept.to(k.dtype)


def at_end(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key: Tensor,
    settings: dict[str, Any],
    extra: dict[str, Any],
) -> Tensor:
    """Attention of the last T of S tokens. `key` is the tensor that a cache returned."""
    S, offset = k.shape[1], k.shape[1] - q.shape[1]
    selection = selection_of(settings)
    if dense_up_to(settings) >= S:
        # nothing to rank: SDPA, where it has the form
        selection |= dict(num_selected_blocks=0, dense_length=ANY_LENGTH, selection_stride=1)
        call = Call(q, k, v, sinks=extra.get("sinks"), q_offset=offset)
        sinks = call.branch_sinks(selection["branches"]).get("selected")
        config = config_with(selection, extra)
        backend = choose_backend(call, config, selection["backend"])
        return branches.attend_densely(call, config, backend, sinks)
    if offset:
        check_stride(settings)
    l, d = settings["compress_block_size"], settings["compress_block_sliding_stride"]
    kept, ck = kept_with(key), None
    if kept is not None and kept.windows == (l, d) and settings["num_selected_blocks"]:
        ck = None if kept.compressed is None else kept.compressed.transpose(1, 2)
    if ck is None or ck.shape[1] != S // d:
        ck = compressed_keys(k, settings)
        kept = kept if ck is None or ck is k else None
    elif ck.dtype != k.dtype:  # autocast
        ck, kept = ck.to(k.dtype), None
    if 0 < offset >= settings["dense_length"]:
        selection["dense_length"] = 0
        if takes_decode_kernels(q, k, v, ck, selection):
            starts = torch.full((q.shape[0],), offset, device=q.device, dtype=torch.int32)
            k, v, ck, counters = with_room(kept, k, v, ck)
            return by_decode_kernels(q, k, v, ck, starts, None, selection, extra, counters)
    selection["use_diff_topk"] = settings["use_diff_topk"]
    return native_sparse_attention(q, k, v, ck, **selection, **extra)


def with_room(
    kept: Kept | None, k: Tensor, v: Tensor, ck: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """k, v, ck, and counters for the decode kernels. Of a `SparseCache` it is the storage, whose
    shapes stay from step to step: later steps repeat the launches of an earlier one."""
    given = dict(keys=k, values=v)
    if ck is not None and ck is not k:
        given["compressed"] = ck
    if kept is None or not kept.stores.keys() >= given.keys():
        return k, v, ck, None
    stores = {name: kept.stores[name].transpose(1, 2) for name in given}
    if stores["keys"].dtype != k.dtype or stores["values"].dtype != v.dtype:  # autocast
        return k, v, ck, None
    k, v = stores["keys"], stores["values"]
    return k, v, stores.get("compressed", None if ck is None else k), kept.counters


def check_stride(settings: dict[str, Any]) -> None:
    if settings["selection_stride"] > 1:
        raise ValueError(
            f"selection_stride must be 1 to decode, got {settings['selection_stride']}: caches of "
            "transformers keep no ranking of earlier tokens"
        )


def dense_up_to(settings: dict[str, Any]) -> int:
    """Queries of sequences of up to so many tokens attend to all that they may see."""
    length: int = settings["dense_length"]
    d, s = settings["compress_block_sliding_stride"], settings["selection_block_size"]
    # blocks whose windows end later are no candidates; gradients of scores need the ranking
    if settings["num_local_blocks"] == 0 or d > s or settings["use_diff_topk"]:
        return length
    names = ("num_initial_blocks", "num_local_blocks", "num_selected_blocks")
    return max(length, s * sum(settings[name] for name in names))


def to_all_keys(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    settings: dict[str, Any],
    extra: dict[str, Any],
    **where: Any,
) -> Tensor:
    """Attention to all past keys, as a window that covers them: SDPA has no form with documents,
    nor with starts that the host does not know."""
    sinks = extra.get("sinks")
    where |= dict(sinks=None if sinks is None else sinks[0], backend=settings["backend"])
    out: Tensor = sliding_window_attention(q, k, v, sliding_window_size=k.shape[1], **extra | where)
    return out


def takes_decode_kernels(
    q: Tensor, k: Tensor, v: Tensor, ck: Tensor | None, selection: dict[str, Any]
) -> bool:
    """Whether few new tokens follow many, and the decode kernels support the call."""
    is_first = selection["backend"] == "triton" or (selection["backend"] == "auto" and q.is_cuda)
    if q.shape[1] > MAX_NEW or not is_first:
        return False
    config = config_with(selection, dict(scale=None, soft_cap=None))
    length = selection["dense_length"]
    facts: dict[str, Any] = dict(config=config, others=(ck,), dense_length=length)
    return not why_not("decode_attention", q, k, v=v, **facts)


def by_decode_kernels(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    ck: Tensor | None,
    starts: Tensor,
    counts: Tensor | None,
    selection: dict[str, Any],
    extra: dict[str, Any],
    counters: Tensor | None = None,
) -> Tensor:
    """`decode_attention` of tensors that fit one another, without its checks."""
    if counters is None:
        counters = decode.workspace(q.shape[0], k.shape[2], q.device)
    return decode.run_decode_kernels(
        config_with(selection, extra), counters, None, q=q, k=k, v=v, ck=ck, lengths=starts,
        counts=counts, sinks=extra.get("sinks"),
    )  # fmt: skip


def config_with(selection: dict[str, Any], extra: dict[str, Any]) -> AttentionConfig:
    """The settings of a call, checked when they are new: a step waits for the host."""
    settings = (*selection.items(), ("scale", extra["scale"]), ("soft_cap", extra["soft_cap"]))
    # the compiler would warn of the cache
    make = config_of.__wrapped__ if torch.compiler.is_compiling() else config_of
    return make(settings)


@functools.lru_cache(maxsize=64)
def config_of(settings: tuple[tuple[str, Any], ...]) -> AttentionConfig:
    named = {name: value for name, value in settings if name != "backend"}
    return AttentionConfig(**named, causal=True)


def over_storage(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    starts: Tensor,
    least: int,
    counts: Tensor | None,
    settings: dict[str, Any],
    extra: dict[str, Any],
    key: Tensor | None = None,
) -> Tensor:
    """Attention of tokens at positions `starts` [B] + 0, 1, .. over k, v [B S K D], of which each
    sequence has written those up to its own. The starts are at least `least`. Of the T queries
    `counts` [B] are tokens. `key`: the tensor that a cache returned, if k is all of it."""
    T, S = q.shape[1], k.shape[1]
    selection = selection_of(settings)
    check_stride(settings)
    if least >= settings["dense_length"]:
        selection["dense_length"] = 0
    if dense_up_to(settings) >= S:
        out = to_all_keys(q, k, v, settings, extra, q_offset=starts)
    else:
        ck = kept_means(key, k, settings)
        if takes_decode_kernels(q, k, v, ck, selection):
            return by_decode_kernels(q, k, v, ck, starts, counts, selection, extra)
        out = native_sparse_attention(q, k, v, ck, q_offset=starts, **selection, **extra)
    if counts is None:
        return out
    padding = torch.arange(T, device=q.device) >= counts[:, None]
    return out.masked_fill(padding[..., None, None], 0)


def over_padded_storage(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor,
    settings: dict[str, Any],
    extra: dict[str, Any],
) -> Tensor:
    """`over_storage` of sequences with padding, by a mask [B 1 1 L]. Keys move to the positions
    that they have without padding."""
    T, L = q.shape[1], mask.shape[-1]
    real, slots, new, starts = storage_of(mask, T)
    if dense_up_to(settings) >= L:
        visible = real[:, None] & (torch.arange(L, device=q.device) <= slots[..., None])
        sinks, rest = extra.get("sinks"), {name: extra[name] for name in ("scale", "soft_cap")}
        out = under_mask(q, k, v, visible[:, None], None if sinks is None else sinks[0], **rest)
        return out.masked_fill(~new[..., None, None], 0)
    least = 0 if torch.compiler.is_compiling() else remembered(STARTS, mask, least_start, (T,))
    k, v = (varlen.pick(t, varlen.real_first(real)) for t in (k, v))
    order = varlen.real_first(new)
    q = varlen.pick(q, order)
    out = over_storage(q, k, v, starts, least, new.sum(1), settings, extra)
    return varlen.pick(out, order.argsort(dim=1))


def storage_of(mask: Tensor, T: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Of a mask [B 1 1 L]: which keys [B L] are tokens; the slots of the T queries [B T], the last
    ones that are written, and which of them are tokens; how many tokens [B] came before."""
    written, real = mask[:, 0, 0] >= 0, mask[:, 0, 0] > 0
    slots = written.sum(1, keepdim=True) - T + torch.arange(T, device=mask.device)
    new = real.gather(1, slots)
    return real, slots, new, real.sum(1) - new.sum(1)


def least_start(mask: Tensor, T: int) -> int:
    """The fewest tokens that a sequence had before its queries."""
    return int(storage_of(mask, T)[-1].min())


def over_documents(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor,
    settings: dict[str, Any],
    extra: dict[str, Any],
) -> Tensor:
    """Attention of whole sequences with padding, or of packed documents, by a mask of tokens."""
    step = max(settings["selection_block_size"], settings["compress_block_sliding_stride"])
    layout = remembered(LAYOUTS, mask, layout_of, (step,))
    q, k, v = (layout.spread(t) for t in (q, k, v))
    documents = layout.documents
    if dense_up_to(settings) >= mask.shape[-1]:
        out = to_all_keys(q, k, v, settings, extra, documents=documents)
    else:
        selection = selection_of(settings) | dict(use_diff_topk=settings["use_diff_topk"])
        ck = compressed_keys(k, settings, documents)
        out = native_sparse_attention(q, k, v, ck, documents=documents, **selection, **extra)
    return layout.collect(out)


def layout_of(mask: Tensor, step: int) -> varlen.Layout:
    """The rows in which every sequence or document of a mask [B 1 1|2 L] begins at a block."""
    real = mask[:, 0, 0] > 0
    ids = mask[:, 0, 1].cumsum(1) if mask.shape[2] == 2 else None
    shape = (mask.shape[0], mask.shape[-1])
    return varlen.layout(shape, mask.device, step, segment_ids=ids, mask=real)
