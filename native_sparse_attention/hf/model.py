"""Switching a model of transformers to sparse attention, and back."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any, TypeVar

from transformers import AttentionInterface, PreTrainedModel, __version__
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from ..checks.scalars import shown
from ..config import NSAConfig
from .attention import attention
from .layer import LayerAttention
from .masks import sparse_mask
from .settings import KEY, REPLACED, check_supported, checked, given, layer_types

NAME = "nsa"

Model = TypeVar("Model")


def register() -> None:
    """Make "nsa" an attention implementation of transformers.

    Raises:
        ImportError: a version whose masks are asked for in another way.
    """
    if "q_length" not in inspect.signature(sdpa_mask).parameters:
        raise ImportError(
            f"native_sparse_attention.hf needs transformers 5.17 or later, got {__version__}"
        )
    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, sparse_mask)


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
    values = checked((given(kept) if config is None and not settings else given(config)) | settings)
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
    check_unconverted(decoder)
    if decoder.config._attn_implementation == NAME:
        kept = getattr(decoder.config, KEY, None)
        decoder.set_attn_implementation((kept or {}).get(REPLACED, "sdpa"))
        if kept is not None:
            delattr(decoder.config, KEY)
    return model


def base_of(model: Any) -> PreTrainedModel:
    """The model itself, without the wrapper of an adapter."""
    if not isinstance(model, PreTrainedModel) and hasattr(model, "get_base_model"):
        model = model.get_base_model()
    if not isinstance(model, PreTrainedModel):
        raise ValueError(f"model must be a PreTrainedModel of transformers, got {shown(model)}")
    return model


def check_unconverted(decoder: PreTrainedModel) -> None:
    if any(isinstance(module, LayerAttention) for module in decoder.modules()):
        raise ValueError(
            "model must not be converted already or of SparseAttention layers, got such a "
            f"{type(decoder).__name__}: load it anew, or set attributes of its SparseAttention "
            "layers, as set_dense(model) does (save_pretrained keeps those of "
            "model.config.nsa_converted)"
        )


def check_model(model: Any) -> PreTrainedModel:
    """The decoder of a model that sparse attention fits."""
    decoder = base_of(model)
    check_unconverted(decoder)
    config, name = decoder.config, type(decoder).__name__

    def refuse(expected: str, got: str) -> None:
        raise ValueError(f"model must be {expected}, got {name} {got}")

    if getattr(config, "is_encoder_decoder", False):
        refuse("a decoder alone", "with an encoder")
    if config.get_text_config(decoder=True) is not config:
        refuse("a decoder of text: give model.get_decoder()", "of several parts")
    modules = (m for m in decoder.modules() if not getattr(m, "is_causal", True))
    if not getattr(config, "is_causal", True) or any(True for _ in modules):
        refuse("causal", "with is_causal=False")
    if not decoder._can_set_attn_implementation():
        refuse("one that calls AttentionInterface of transformers", "with attention of its own")
    check_supported(config, name)
    if "full_attention" not in layer_types(config):
        window = getattr(config, "sliding_window", None)
        refuse(
            "one with layers of full attention, as others have their window already",
            f"with sliding_window={window} in all layers",
        )
    return decoder
