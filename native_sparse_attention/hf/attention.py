"""`use_sparse_attention`: the attention function that transformers calls for each layer.

B  batch            T  query tokens          S  key tokens, past ones included
H  query heads      K  KV heads              D  head dimension
L  keys that are written, of S               l, d  tokens of a window, and from window to window
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any, TypeVar

import torch
from torch import Tensor
from transformers import AttentionInterface, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface

from .. import varlen
from ..attention import SparseAttention
from ..checks.scalars import shown
from ..compat.sdpa import sdpa
from ..compress import windows_of
from ..config import AttentionConfig, NSAConfig
from ..ops.decode import decode_attention
from ..ops.functional import sliding_window_attention
from ..ops.nsa import native_sparse_attention
from ..ops.triton.backend import why_not
from .cache import kept_means
from .mask import NSAMask, nsa_mask, read_mask, read_positions
from .settings import (
    ANY_LENGTH,
    DEFAULTS,
    KEY,
    NAME,
    REPLACED,
    check_supported,
    drop_in_settings,
    layer_types,
    settings_of,
)

Model = TypeVar("Model")

# most new tokens per sequence of the decode kernels
MAX_NEW = 16


def attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: NSAMask | Tensor | None = None,
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
        attention_mask: of `nsa_mask`, or of the user, [B, 1, T, S].
        softcap, s_aux: the soft cap of logits; a sink [H] for each query head.
        sliding_window: tokens that a query of this layer sees, its own included.

    Returns:
        [B, T, H, E] and None. The output of padding is 0.

    Raises:
        ValueError: a mask of another form, dropout, weights asked for, or no causal attention.
    """
    check_call(module, dropout, is_causal, others)
    q, k, v = cast_to_common_dtype(query, key, value)
    (B, T), S = q.shape[:2], k.shape[1]
    sinks = None if s_aux is None else s_aux.to(q.dtype)
    options = dict(scale=scaling, soft_cap=softcap, sinks=sinks)
    mask: Any = attention_mask
    if sliding_window is None or isinstance(mask, NSAMask) or mask is None:
        mask = read_mask(mask, B, T, S)
        L: Any = S if mask is None else mask.length
        plain = (mask is None or not mask.has_rows) and isinstance(L, int) and T > 1
        if plain and (sliding_window is None or S == T):
            past = None if S == T else L - T
            mask = read_positions(others.get("position_ids"), B, T, past) or mask
    settings = settings_of(module.config)
    if sliding_window is None:
        out = attend_blocks(q, k, v, mask, key, settings, options)
    else:
        out = attend_window(q, k, v, mask, sliding_window, settings["backend"], options)
    return out.contiguous(), None


def check_call(module: Any, dropout: float, is_causal: bool | None, others: dict[str, Any]) -> None:
    """Check that a layer asks for what sparse attention has."""
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


def cast_to_common_dtype(*tensors: Tensor) -> list[Tensor]:
    """Heads [B H T D] as [B T H D] of one dtype: under autocast its own, else that of values."""
    device, dtype = tensors[0].device.type, tensors[-1].dtype
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
    return [t.to(dtype).transpose(1, 2) for t in tensors]


# layers with a window of their own


def attend_window(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: NSAMask | Tensor | None,
    sliding_window: int,
    backend: str,
    options: dict[str, Any],
) -> Tensor:
    """Attention [B T H E] to the last `sliding_window` keys, or to those of a mask [B, 1, T, S]."""
    if isinstance(mask, NSAMask) and mask.length != q.shape[1]:  # the model left out queries
        mask = visible_in_window(mask, q.shape[1], k.shape[1], sliding_window)
    if isinstance(mask, Tensor):
        return attend_under_mask(q, k, v, mask, **options)
    settings = dict(options, sliding_window_size=sliding_window - 1, backend=backend)
    if mask is None:
        return sliding_window_attention(q, k, v, **settings)
    layout = mask.layout(1)
    q, k, v = (layout.spread(t) for t in (q, k, v))
    return layout.collect(sliding_window_attention(q, k, v, documents=layout.documents, **settings))


def visible_in_window(mask: NSAMask, T: int, S: int, sliding_window: int) -> Tensor:
    """Which of S keys the last T queries of a mask see in a window: bool [B, 1, T, S]."""
    key = torch.arange(S, device=(mask.tokens if mask.documents is None else mask.documents).device)
    query = key[:T, None] + (mask.length - T)
    visible = (key <= query) & (key > query - sliding_window)
    if mask.tokens is not None:
        visible = visible & mask.tokens[:, None]
    if mask.documents is not None:
        visible = visible & (mask.documents[:, None] == mask.documents[:, -T:, None])
    return visible.expand(-1, T, S)[:, None]


def attend_under_mask(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor,
    *,
    scale: float | None,
    soft_cap: float | None,
    sinks: Tensor | None,
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


def attend_blocks(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: NSAMask | None,
    key: Tensor,
    settings: dict[str, Any],
    options: dict[str, Any],
) -> Tensor:
    """Attention [B T H E] to blocks, with padding, packed documents, or keys that are not written.
    `key` is the tensor that a cache returned."""
    T, L = q.shape[1], k.shape[1] if mask is None else mask.length
    if isinstance(L, int) and k.shape[1] > L:  # a static cache is longer than its sequences
        k, v = k[:, :L], v[:, :L]
    if mask is None or not mask.has_rows:
        starts: int | Tensor = L - T
        least = starts
        if isinstance(starts, Tensor):
            starts = starts.expand(q.shape[0])
            least = settings["dense_length"] if mask is not None and mask.past_dense_length else 0
        return attend(q, k, v, settings, options, starts, least, key=key)
    if mask.tokens is not None and (isinstance(L, Tensor) or T != L):
        return attend_padded(q, k, v, mask, settings, options)
    layout = mask.layout(
        max(settings["selection_block_size"], settings["compress_block_sliding_stride"])
    )
    q, k, v = (layout.spread(t) for t in (q, k, v))
    return layout.collect(attend(q, k, v, settings, options, documents=layout.documents, longest=L))


def attend_padded(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: NSAMask,
    settings: dict[str, Any],
    options: dict[str, Any],
) -> Tensor:
    """Attention of new tokens over a cache with padding. Keys move to the positions that they have
    without it."""
    if mask.documents is not None:
        raise ValueError(f"attention_mask must be of {q.shape[1]} tokens with packed documents")
    L, tokens = k.shape[1], mask.tokens
    slots, new, starts = mask.queries(q.shape[1])
    if dense_up_to(settings) >= L:
        visible = tokens[:, None] & (torch.arange(L, device=q.device) <= slots[:, None])
        out = attend_under_mask(q, k, v, visible[:, None], **options)
        return out.masked_fill(~new[..., None, None], 0)
    least = 0 if torch.compiler.is_compiling() else mask.once(least_start, q.shape[1])
    order = varlen.real_first(new)
    k, v = (varlen.pick(t, varlen.real_first(tokens)) for t in (k, v))
    out = attend(varlen.pick(q, order), k, v, settings, options, starts, least, new.sum(1))
    return varlen.pick(out, order.argsort(dim=1))


def least_start(mask: NSAMask, T: int) -> int:
    """The fewest tokens that a sequence has before its T queries."""
    return int(mask.queries(T)[-1].min())


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    settings: dict[str, Any],
    options: dict[str, Any],
    starts: int | Tensor = 0,
    least: Any = 0,
    counts: Tensor | None = None,
    *,
    documents: varlen.Documents | None = None,
    longest: int | None = None,
    key: Tensor | None = None,
) -> Tensor:
    """Attention [B T H E] of tokens at positions `starts` + 0, 1, .. over k, v [B S K D], of which
    each sequence has written those up to its own.

    Args:
        starts: an int or [B]; none is less than `least`.
        counts: how many [B] of the T queries are tokens; the output of others is 0.
        documents: of rows that begin at blocks, of at most `longest` tokens.
        key: the tensor that a cache returned, if it holds these keys.
    """
    S, is_known = k.shape[1], isinstance(starts, int)
    is_first = is_known and not starts
    call: Any = dict(options, backend=settings["backend"])
    # queries are the last tokens, or begin where the host does not know
    layout: Any = dict(documents=documents, q_offset=None if is_known else starts)
    is_dense = dense_up_to(settings) >= (S if longest is None else longest)
    if is_dense and (documents is not None or not is_known):  # SDPA has no form of it
        out = sliding_window_attention(q, k, v, sliding_window_size=S, **call, **layout)
        return zero_padding(out, counts)
    if settings["selection_stride"] > 1 and not (is_dense or is_first):
        raise ValueError(
            f"selection_stride must be 1 to decode, got {settings['selection_stride']}: caches of "
            "transformers keep no ranking of earlier tokens"
        )
    call |= {name: settings[name] for name in DEFAULTS}
    call |= dict(branches=("selected",), sliding_window_size=0)
    if call["sinks"] is not None:
        call["sinks"] = call["sinks"][None]
    if is_dense:
        call |= dict(num_selected_blocks=0, dense_length=ANY_LENGTH)
        call |= dict(selection_stride=1, use_diff_topk=False)
    elif least >= settings["dense_length"]:
        call["dense_length"] = 0
    ck = None if is_dense else compressed_keys(k, settings, documents, key)
    if documents is None and not is_first and not is_dense and supports_decode(q, k, v, ck, call):
        lengths: Any = starts
        if isinstance(starts, int):
            lengths = torch.full((len(q),), starts, device=q.device, dtype=torch.int32)
        del call["use_diff_topk"]
        return decode_attention(q, k, v, ck, None, None, lengths, counts=counts, **call)
    return zero_padding(native_sparse_attention(q, k, v, ck, **call, **layout), counts)


def zero_padding(out: Tensor, counts: Tensor | None) -> Tensor:
    """The output [B T H E], 0 after the first `counts` queries of each sequence."""
    if counts is None:
        return out
    padding = torch.arange(out.shape[1], device=out.device) >= counts[:, None]
    return out.masked_fill(padding[..., None, None], 0)


def supports_decode(
    q: Tensor, k: Tensor, v: Tensor, ck: Tensor | None, call: dict[str, Any]
) -> bool:
    """Whether few new tokens follow many, and the decode kernels support the call."""
    has_kernels = call["backend"] == "triton" or (call["backend"] == "auto" and q.is_cuda)
    if q.shape[1] > MAX_NEW or not has_kernels:
        return False
    names = {field.name for field in fields(AttentionConfig)} & call.keys()
    config = AttentionConfig(causal=True, **{name: call[name] for name in names})
    facts: dict[str, Any] = dict(config=config, others=(ck,), dense_length=call["dense_length"])
    return not why_not("decode_attention", q, k, v=v, **facts)


def compressed_keys(
    k: Tensor,
    settings: dict[str, Any],
    documents: varlen.Documents | None = None,
    key: Tensor | None = None,
) -> Tensor | None:
    """The keys [B W K D] that rank blocks: means of windows of k [B S K D], or k itself. A cache
    may keep them with the tensor `key` that it returned."""
    l, d = settings["compress_block_size"], settings["compress_block_sliding_stride"]
    if settings["num_selected_blocks"] == 0:
        return None
    if l == d == 1:
        return k
    kept = None if key is None else kept_means(key, l, d)
    if kept is not None:
        return kept[:, :, : k.shape[1] // d].transpose(1, 2).to(k.dtype)
    windows = windows_of(k.transpose(1, 2), l, d, True, documents)
    return windows.mean(dim=-2).transpose(1, 2)


def dense_up_to(settings: dict[str, Any]) -> int:
    """Queries of sequences of up to so many tokens attend to all that they may see."""
    length: int = settings["dense_length"]
    d, s = settings["compress_block_sliding_stride"], settings["selection_block_size"]
    # blocks whose windows end later are no candidates; gradients of scores need the ranking
    if settings["num_local_blocks"] == 0 or d > s or settings["use_diff_topk"]:
        return length
    names = ("num_initial_blocks", "num_local_blocks", "num_selected_blocks")
    return max(length, s * sum(settings[name] for name in names))


# switching a model


def register() -> None:
    """Make "nsa" an attention implementation of transformers."""
    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, nsa_mask)


def use_sparse_attention(
    model: Model, config: NSAConfig | Mapping[str, Any] | None = None, **settings: Any
) -> Model:
    """Let the layers of full attention attend to the initial, local and ranked blocks alone.

    `out_i = softmax_j(q_i . k_j * scale) v_j` over the tokens j <= i of these blocks. No weights
    are added or changed. Layers with a sliding window keep it. Queries at positions below
    `dense_length` attend to all keys.

    Args:
        model: a causal decoder of transformers, loaded.
        config: an `NSAConfig` or a dict of its settings. Without config and settings, those that
            `model.config.nsa_config` keeps, as after `save_pretrained` and `from_pretrained`.
        settings: single settings, which replace those of `config` and the defaults:
            selection_block_size (64), num_selected_blocks (16), num_initial_blocks (1),
            num_local_blocks (8), dense_length (8192), importance ("max"), compress_block_size and
            compress_block_sliding_stride (1, tokens themselves rank blocks),
            interpolated_importance_score, selection_stride, query_heads_share_selected_kv,
            use_diff_topk, backend ("auto").

    Returns:
        The model. It may be called again, with other settings.

    Raises:
        ValueError: a model without this form of attention, or a setting that is unknown, out of
            range, or not of this form.
    """
    decoder = check_model(model)
    kept = getattr(decoder.config, KEY, None) or {}
    values = drop_in_settings(kept if config is None and not settings else config, settings)
    replaced = decoder.config._attn_implementation
    if replaced == NAME:
        replaced = kept.get(REPLACED, "sdpa")
    setattr(decoder.config, KEY, values | {REPLACED: replaced})
    decoder.set_attn_implementation(NAME)
    return model


def use_dense_attention(model: Model) -> Model:
    """Give a model its own attention back: the implementation that `use_sparse_attention`
    replaced. `model.config` then keeps no settings. Without sparse attention it changes nothing.

    Raises:
        ValueError: not a model of transformers, or one of SparseAttention layers.
    """
    decoder = base_of(model)
    if decoder.config._attn_implementation == NAME:
        kept = getattr(decoder.config, KEY, None)
        decoder.set_attn_implementation((kept or {}).get(REPLACED, "sdpa"))
        if kept is not None:
            delattr(decoder.config, KEY)
    return model


def base_of(model: Any) -> PreTrainedModel:
    """The model itself, without the wrapper of an adapter.

    Raises:
        ValueError: not a model of transformers, or one of SparseAttention layers.
    """
    if not isinstance(model, PreTrainedModel) and hasattr(model, "get_base_model"):
        model = model.get_base_model()
    if not isinstance(model, PreTrainedModel):
        raise ValueError(f"model must be a PreTrainedModel of transformers, got {shown(model)}")
    if any(isinstance(module, SparseAttention) for module in model.modules()):
        raise ValueError(
            "model must not be converted already or of SparseAttention layers, got such a "
            f"{type(model).__name__}: load it anew, or set attributes of its SparseAttention "
            "layers, as set_dense(model) does (save_pretrained keeps those of "
            "model.config.nsa_converted)"
        )
    return model


def check_model(model: Any) -> PreTrainedModel:
    """The decoder of a model that sparse attention fits.

    Raises:
        ValueError: it does not.
    """
    decoder = base_of(model)
    config, name = decoder.config, type(decoder).__name__
    full = "full_attention" in layer_types(config)
    is_causal = getattr(config, "is_causal", True) and all(
        getattr(module, "is_causal", True) for module in decoder.modules()
    )
    window = getattr(config, "sliding_window", None)
    for is_right, expected, got in (
        (not getattr(config, "is_encoder_decoder", False), "a decoder alone", "with an encoder"),
        (
            config.get_text_config(decoder=True) is config,
            "a decoder of text: give model.get_decoder()",
            "of several parts",
        ),
        (is_causal, "causal", "with is_causal=False"),
        (
            decoder._can_set_attn_implementation(),
            "one that calls AttentionInterface of transformers",
            "with attention of its own",
        ),
    ):
        if not is_right:
            raise ValueError(f"model must be {expected}, got {name} {got}")
    check_supported(config, name)
    if not full:
        raise ValueError(
            "model must be one with layers of full attention, as others have their window already, "
            f"got {name} with sliding_window={window} in all layers"
        )
    return decoder
