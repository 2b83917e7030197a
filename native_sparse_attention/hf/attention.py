"""`use_sparse_attention`: the attention function that transformers calls for each layer.

B  batch            T  query tokens          S  key tokens, past ones included
H  query heads      K  KV heads              D  head dimension
L  keys that are written, of S               l, d  tokens of a window, and from window to window
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor
from transformers import AttentionInterface, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface

from .. import varlen
from ..attention import SparseAttention
from ..checks.scalars import shown
from ..checks.tensors import IMPORTANCE_RULES, check_choice
from ..compat.sdpa import sdpa
from ..compress import windows_of
from ..config import AttentionConfig, NSAConfig
from ..ops import branches, decode, dispatch
from ..ops.call import Call, DecodeInputs
from ..ops.triton.backend import why_not
from .cache import kept_means
from .mask import NSAMask, check_layers, layer_types, nsa_mask, read_mask
from .settings import (
    DEFAULTS,
    FIXED,
    KEY,
    NAME,
    REPLACED,
    drop_in_settings,
    kept_settings,
    layer_config,
)

Model = TypeVar("Model")

# what a layer may ask for in vain
REFUSED = {
    "dropout": "attention_dropout must be 0 with sparse attention, got {}: set "
    "model.config.attention_dropout and that of the attention modules, or model.eval()",
    "output_attentions": "output_attentions must be False with sparse attention, which forms no "
    "weights, got {}: use_dense_attention(model) and attn_implementation='eager' give them, "
    "native_sparse_attention.view.collect(model) records what SparseAttention layers read",
    "position_bias": "position_bias must be None with sparse attention, got a bias of logits",
}


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
    **options: Any,
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
    check_call(module, is_causal, dict(options, dropout=dropout))
    dtype = value.dtype
    if torch.is_autocast_enabled(query.device.type):
        dtype = torch.get_autocast_dtype(query.device.type)
    q, k, v = (t.to(dtype).transpose(1, 2) for t in (query, key, value))
    sinks = None if s_aux is None else s_aux.to(dtype)
    logits = scaling, softcap, sinks
    is_window = sliding_window is not None
    if is_window and isinstance(attention_mask, Tensor):  # of the few keys of a window's cache
        return attend_under_mask(q, k, v, attention_mask, *logits), None

    (B, T), S = q.shape[:2], k.shape[1]
    positions = None if is_window and S != T else options.get("position_ids")
    mask = read_mask(attention_mask, positions, B, T, S, S != T)
    L: Any = S if mask is None else mask.length
    if isinstance(L, int) and S > L:  # a static cache is longer than its sequences
        k, v, S = k[:, :L], v[:, :L], L
    settings = drop_in_settings(module.config)
    backend, dense_length = settings.pop("backend"), settings["dense_length"]
    s, d = settings["selection_block_size"], settings["compress_block_sliding_stride"]
    is_dense = not is_window and dense_limit(settings) >= S

    # queries are at positions `starts` + 0, 1, .., none of them before `first`; where rows differ,
    # `move` puts queries there, and keys are moved too
    starts, first, documents, counts, move = L - T, 0, None, None, None
    if mask is not None and mask.tokens is not None and (isinstance(L, Tensor) or T != L):
        if mask.documents is not None:
            raise ValueError(f"attention_mask must be of {T} tokens with packed documents")
        if is_window or is_dense:
            out = attend_under_mask(q, k, v, mask.visible(T, S, sliding_window), *logits)
            return out.masked_fill(~mask.queries(T)[..., None, None], 0), None
        move, key_move, starts, counts, first = mask.share(NSAMask.step, T)
        k, v = (varlen.Move.apply(t, *key_move) for t in (k, v))
    elif mask is not None and mask.has_rows:
        layout = mask.share(NSAMask.layout, 1 if is_window else max(s, d))
        documents, move = layout.documents, (layout.source, layout.target)
        k, v = (varlen.Move.apply(t, *move) for t in (k, v))
    elif isinstance(starts, Tensor):
        starts = starts.expand(B).long().contiguous()
        first = dense_length if mask is not None and mask.past_dense_length else 0
    else:
        first = starts
    if move is not None:
        q = varlen.Move.apply(q, *move)

    is_whole = isinstance(starts, int) and starts == 0
    if sliding_window is not None:
        settings |= dict(dense_length=0, sliding_window_size=sliding_window - 1)
    elif is_dense:
        settings |= dict(num_selected_blocks=0, selection_stride=1, dense_length=sys.maxsize)
    elif settings["selection_stride"] > 1 and not is_whole:
        raise ValueError(
            f"selection_stride must be 1 to decode, got {settings['selection_stride']}: caches of "
            "transformers keep no ranking of earlier tokens"
        )
    elif first >= dense_length:
        settings["dense_length"] = 0
    config = AttentionConfig.unchecked(
        **settings, branches=("window",) if is_window else ("selected",), causal=True,
        scale=scaling, soft_cap=softcap,
    )  # fmt: skip
    ck: Tensor | None = None
    if config.ranks and not is_window:  # keys that rank blocks: all, or means of windows
        l = config.compress_block_size
        means = kept_means(key, l, d) if move is None else None
        if l == d == 1:
            ck = k
        elif means is not None:
            ck = means[:, :, : k.shape[1] // d].transpose(1, 2).to(k.dtype)
        else:
            windows = windows_of(k.transpose(1, 2), l, d, True, documents)
            ck = windows.mean(dim=-2).transpose(1, 2)
    call = Call(q, k, v, ck, q_offset=starts, documents=documents)
    call = call if sinks is None else call.but(sinks=sinks[None])
    is_step = backend == "triton" or (backend == "auto" and q.is_cuda)
    is_step = is_step and not (is_window or is_dense or is_whole)
    if is_step and not why_not("decode_attention", call, config):
        if isinstance(starts, int):
            starts = torch.full((B,), starts, device=q.device, dtype=torch.int32)
        counters = decode.workspace(B, k.shape[2], q.device)
        step = DecodeInputs(q, k, v, starts, ck, counts=counts, sinks=call.sinks, counters=counters)
        out = decode.run_decode_kernels(config, step)
    else:
        op = "sliding_window_attention" if is_window else "native_sparse_attention"
        name = dispatch.choose(backend, op, call, config)
        out, _ = branches.attend(call, config, name)
    if move is not None:
        out = varlen.Move.apply(out, *reversed(move))
    return out.contiguous(), None


def check_call(module: Any, is_causal: bool | None, request: Mapping[str, Any]) -> None:
    """Check that a layer asks for what sparse attention has."""
    for name, message in REFUSED.items():
        value = request.get(name)
        if isinstance(value, Tensor) or value:
            raise ValueError(message.format(value))
    if not (getattr(module, "is_causal", True) if is_causal is None else is_causal):
        raise ValueError(
            f"is_causal must be True with sparse attention, got False in {type(module).__name__}"
        )


def attend_under_mask(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor,
    scale: float | None,
    soft_cap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Attention [B T H E] of q [B T H D] and k, v [B S K D] under a mask [B, 1, T, S], of bool or
    of floats to add to logits."""
    mask = mask.to(q.dtype) if mask.is_floating_point() else mask != 0
    groups = q.shape[2] // k.shape[2]
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    if sinks is None and soft_cap is None:
        out = sdpa(q, k, v, attn_mask=mask, scale=scale, enable_gqa=groups > 1)
        return out.transpose(1, 2).contiguous()
    k, v = (t.repeat_interleave(groups, dim=1) for t in (k, v))
    logits = (q @ k.mT).float() * (q.shape[-1] ** -0.5 if scale is None else scale)
    if soft_cap is not None:
        logits = soft_cap * torch.tanh(logits / soft_cap)
    bound = torch.finfo(logits.dtype).min / 2  # finite: a row of padding has no NaN
    if mask.is_floating_point():
        logits = logits + mask.float().clamp(min=bound)
    else:
        logits = logits.masked_fill(~mask, bound)
    if sinks is not None:
        sink = sinks.float()[:, None, None].expand(*logits.shape[:-1], 1)
        logits = torch.cat((logits, sink), dim=-1)
    weights = logits.softmax(dim=-1)[..., : k.shape[2]]
    return (weights.to(v.dtype) @ v).transpose(1, 2).contiguous()


def dense_limit(settings: Mapping[str, Any]) -> int:
    """Queries of sequences of up to so many tokens attend to all that they may see."""
    length: int = settings["dense_length"]
    s, d = settings["selection_block_size"], settings["compress_block_sliding_stride"]
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
    saved = dict(getattr(decoder.config, KEY, None) or {})
    replaced = saved.pop(REPLACED, "sdpa")
    user = saved if config is None and not settings else config
    layer = layer_config(user, settings, DEFAULTS, FIXED)
    check_choice("importance", layer.importance, IMPORTANCE_RULES)
    if decoder.config._attn_implementation != NAME:
        replaced = decoder.config._attn_implementation
    setattr(decoder.config, KEY, kept_settings(layer, DEFAULTS) | {REPLACED: replaced})
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
        saved = getattr(decoder.config, KEY, None)
        decoder.set_attn_implementation((saved or {}).get(REPLACED, "sdpa"))
        if saved is not None:
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
    is_causal = getattr(config, "is_causal", True)
    is_causal = is_causal and all(getattr(m, "is_causal", True) for m in decoder.modules())
    is_part = config.get_text_config(decoder=True) is not config
    problem = None
    if getattr(config, "is_encoder_decoder", False):
        problem = f"a decoder alone, got {name} with an encoder"
    elif is_part:
        problem = f"a decoder of text: give model.get_decoder(), got {name} of several parts"
    elif not is_causal:
        problem = f"causal, got {name} with is_causal=False"
    elif not decoder._can_set_attn_implementation():
        problem = (
            "one that calls AttentionInterface of transformers, got "
            f"{name} with attention of its own"
        )
    else:
        check_layers(config, name)
        if "full_attention" not in layer_types(config):
            problem = (
                "one with layers of full attention, as others have their window already, got "
                f"{name} with sliding_window={config.sliding_window} in all layers"
            )
    if problem:
        raise ValueError(f"model must be {problem}")
    return decoder
