"""`use_sparse_attention`: the attention function that transformers calls for each layer.

B  batch            T  query tokens          S  key tokens, past ones included
H  query heads      K  KV heads              D  head dimension
L  keys that are written, of S               l, d  tokens of a window, and from window to window
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AttentionInterface, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface

from ..attention import SparseAttention
from ..checks import check_type, refusal
from ..compat import refuse_context_parallel, sdpa
from ..compress import Networks, windows_of
from ..config import GIVEN, NSAConfig
from ..ops import branches, decode, dispatch, reference
from ..ops.call import Call
from ..ops.reference import Visibility
from ..ops.triton.backend import why_not
from ..varlen import Move
from .cache import kept_means, rankings_of
from .configuration import (
    CONVERTED_KEY,
    KEY,
    NAME,
    REPLACED,
    drop_in_config,
    drop_in_settings,
)
from .mask import NSAMask, check_call, check_layers, nsa_mask

Model = TypeVar("Model")

# keys that rank blocks, of windows [b h w l d] of a shard
MEANS: Networks = {"k": (lambda windows: windows.mean(dim=-2), None)}
# in place of the settings of a selection, where a model gives its block indices
GIVEN_BLOCKS: dict[str, Any] = GIVEN | dict(
    num_initial_blocks=0, num_local_blocks=0, selection_stride=1, dense_length=0,
    compress_block_size=1, compress_block_sliding_stride=1,
)  # fmt: skip


def attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: NSAMask | None = None,
    *, scaling: float | None = None, softcap: float | None = None,
    sliding_window: int | None = None, s_aux: Tensor | None = None,
    block_indices: Tensor | None = None, **options: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """One softmax over the initial, local and ranked blocks of each query [B, H, T, D], or over its
    window of `sliding_window` tokens, as `AttentionInterface` asks for it: [B, T, H, E] and None.
    `s_aux` are sinks [H]. The output of padding has no meaning.

    With the `block_indices` [B, R, T, n] of a model that selects, -1 for none, a query attends to
    these blocks of `module.indexer.block_size` slots alone, and settings of a selection have no
    effect."""
    refuse_context_parallel("use_sparse_attention")
    context = getattr(module, "context", None)  # of distributed.parallelize: tokens are a shard
    if sliding_window is None:  # layers of Qwen2-MoE leave their window to the mask
        holder, name = (attention_mask, "window") if context is None else (module, "sliding_window")
        sliding_window = getattr(holder, name, None)
    (B, _, T, _), S, is_window = query.shape, key.shape[2], sliding_window is not None
    if not is_window and getattr(module.config, CONVERTED_KEY, None):
        expected = "loaded by load_converted, as convert made it"
        raise refusal("model", expected, got=f"{type(module).__name__} in place of its layers")
    mask = NSAMask(S) if attention_mask is None else attention_mask
    mask = check_call(module, mask, (B, T), query.device, options)
    dtype = value.dtype
    if torch.is_autocast_enabled(query.device.type):
        dtype = torch.get_autocast_dtype(query.device.type)
    q, k, v = (t.to(dtype).transpose(1, 2) for t in (query, key, value))
    sinks: Any = None if s_aux is None else s_aux.to(dtype)
    if block_indices is not None and not mask.share(NSAMask.has_slots):
        expected = "padding on the right alone, none over a cache and no documents"
        got = f"others in {type(module).__name__}, whose blocks count slots"
        raise ValueError(f"attention_mask must have {expected}, got {got}")
    out: Any
    if mask.visible is not None and sinks is None and softcap is None:
        is_grouped, heads = q.shape[2] != k.shape[2], (t.transpose(1, 2) for t in (q, k, v))
        out = sdpa(*heads, attn_mask=mask.visible, scale=scaling, enable_gqa=is_grouped)
        return out.transpose(1, 2).contiguous(), None
    if mask.visible is not None:
        visible = mask.visible[:, :, None]
        q, k, v = reference.upcast(q, k, v)
        visibility = Visibility(lambda *tile: visible, lambda *rows: (0, S), 0)
        out = reference.attend(q, k, v, visibility, scale=scaling, soft_cap=softcap, sinks=sinks)
        return out.to(dtype).contiguous(), None

    L = mask.length
    if context is not None:
        S, L = context.size * T, T
    elif isinstance(L, int) and S > L:  # a static cache is longer than its sequences
        k, v, S = k[:, :L], v[:, :L], L
    saved, config = getattr(module.config, KEY, None) or {}, drop_in_config(module.config)
    backend, ranking_layers = saved.get("backend", "auto"), saved.get("share_ranking")
    if block_indices is not None:
        ranking_layers, R = None, block_indices.shape[1]
        num_heads = (k if k.shape[2] % R == 0 else q).shape[2]
        block_indices = block_indices.int().transpose(1, 2).repeat_interleave(num_heads // R, dim=2)
        config = config.but(**GIVEN_BLOCKS, selection_block_size=module.indexer.block_size)
    stride, dense_length = config.leader_stride, config.dense_length
    l, d = config.compress_block_size, config.d
    if context is not None:
        context.check_length("input_ids", T, config)

    # queries are at positions `starts` + 0, 1, .., none of them before `first`; where rows differ,
    # they and the keys move there
    queries: Any = None
    keys: Any = None
    starts, documents, counts = L - T, None, None
    num_earlier = starts
    first = starts if isinstance(starts, int) else mask.least_position
    if mask.documents is not None:
        alignment = 1 if is_window else max(config.selection_block_size, stride, d)
        layout = mask.share(NSAMask.layout, alignment)
        documents, starts, first = layout.documents, 0, 0
        queries = keys = layout.source, layout.target
    elif mask.tokens is not None:
        queries, keys, starts, counts, first = mask.share(NSAMask.compact, T)
    elif isinstance(starts, Tensor):
        starts = starts.expand(B).long().contiguous()
    if queries is not None:
        q, k, v = Move.apply(q, *queries), Move.apply(k, *keys), Move.apply(v, *keys)

    is_whole = isinstance(starts, int) and starts == 0
    if sliding_window is not None:
        config = config.but(branches=("window",), sliding_window_size=sliding_window - 1)
    elif stride > 1 and not is_whole:
        # tokens whose blocks cover all that they see may have come without a ranking
        dense_length = config.dense_limit
    limit = 0 if is_window or first >= dense_length else dense_length
    config = config.but(dense_length=limit, scale=scaling, soft_cap=softcap)
    is_dense = not is_window and config.dense_limit >= S
    source = None
    if ranking_layers and not (is_window or is_dense):
        source = max(i for i in ranking_layers if i <= module.layer_idx)
    is_source = source is not None and source == module.layer_idx
    if source is not None and not is_source:
        config, block_indices = config.but(**GIVEN), mask.shared_indices(source, q.device)
    ranks = config.ranks and not is_dense
    leads, ranking = False, cast(Any, None)
    if ranks and stride > 1:
        leads = isinstance(num_earlier, Tensor) or num_earlier > dense_length
        rankings = getattr(key, "nsa_rankings", {} if leads else None)
        if rankings is not None:
            num_heads = (k if config.query_heads_share_selected_kv else q).shape[2]
            # other sizes than those of the call before make them numbers of other blocks
            sizes = config.selection_block_size, config.num_selected_groups
            place = (getattr(module, "layer_idx", None), *sizes), key, num_heads
            ranking, is_new = rankings_of(rankings, *place, config.leader_slots, num_earlier, L)
            leads &= is_new
    ck: Tensor | None = None
    if ranks and l == d == 1:  # tokens rank blocks
        ck = k
    elif ranks:  # means of windows do, which a cache may keep
        means = kept_means(key, l, d) if keys is None else None
        if context is not None:
            means = context.compress({"k": k.transpose(1, 2)}, MEANS, config, None)["ck"]
        elif means is None:
            means = windows_of(k.transpose(1, 2), l, d, True, documents).mean(dim=-2)
        ck = means[:, :, : k.shape[1] // d].transpose(1, 2).to(k.dtype)
    sinks = None if sinks is None else sinks[None]
    call = Call(
        q, k, v, ck, q_offset=starts, documents=documents, sinks=sinks, block_indices=block_indices
    )
    has_kernels = backend == "triton" or (backend == "auto" and q.is_cuda)
    is_step = has_kernels and not (is_window or is_dense or is_whole)
    op = "sliding_window_attention" if is_window else "native_sparse_attention"
    if isinstance(starts, int) and (is_step or ranking is not None):
        starts = torch.full((B,), starts, device=q.device, dtype=torch.int32)
    if leads:  # the first token, in place of a leader whose ranking nobody kept
        kind = dispatch.choose(backend, "select_blocks", call, config)
        new: Any = branches.rank_in_place_of_leader(call, config, kind)
        decode.write_rankings(ranking, new, starts - 1, starts)
    if is_step and not why_not("decode_attention", call, config):
        counters = decode.workspace(B, k.shape[2], q.device)
        call = call.but(lengths=starts, counts=counts, counters=counters, ranking=ranking)
        if is_source:
            block_indices = branches.no_blocks(call, config, config.num_selected_blocks)
            call = call.but(new_indices=block_indices)
        out = decode.run_decode_kernels(config, call)
    elif is_dense and context is None:
        branches.warn_dense(call, config)
        out = branches.attend_densely(call, config, dispatch.choose(backend, op, call, config))
    else:
        backend = dispatch.choose(backend, op, call, config)
        if ranking is None:
            attend = branches.attend if context is None else context.attend
            out, block_indices = attend(call, config, backend, context is not None and is_source)
        else:
            ends = starts + (T if counts is None else counts)
            out, block_indices = decode.attend_with_rankings(call, config, backend, ranking, ends)
    if is_source and block_indices is not None:  # of a call that is dense at first, with -1 there
        num_dense = q.shape[1] - block_indices.shape[1]
        padding = (0, 0, 0, 0, num_dense, 0)
        mask.block_indices[module.layer_idx] = F.pad(block_indices, padding, value=-1)
    if queries is not None:
        out = Move.apply(out, *reversed(queries))
    return out.contiguous(), None


AttentionInterface.register(NAME, attention)
AttentionMaskInterface.register(NAME, nsa_mask)


def use_sparse_attention(
    model: Model, config: NSAConfig | Mapping[str, Any] | None = None, **settings: Any
) -> Model:
    """Let the layers of full attention attend to the initial, local and ranked blocks alone.

    `out_i = softmax_j(q_i . k_j * scale) v_j` over the tokens j <= i of these blocks. Weights stay
    as they are. Queries at positions below `dense_length` attend to all keys. Returns the model,
    which may be given other settings later.

    Args:
        model: a causal decoder of transformers, loaded.
        config: an `NSAConfig` or a dict of its settings. Without config and settings, those that
            `model.config.nsa_config` keeps, as after `save_pretrained` and `from_pretrained`.
        settings: single settings, which replace those of `config` and the defaults: 16 ranked, 1
            initial and 8 local blocks of 64 tokens, ranked by their tokens, after dense_length=8192
            (docs/huggingface.md lists them all); and share_ranking: indices of layers that rank for
            themselves and for the layers of full attention after them, up to the next of these.
    """
    decoder = check_model(model)
    saved = getattr(decoder.config, KEY, None) or {}
    user = saved if config is None and not settings else config
    kept = drop_in_settings(decoder.config, user, settings)
    replaced = decoder.config._attn_implementation
    replaced = saved.get(REPLACED, "sdpa") if replaced == NAME else replaced
    setattr(decoder.config, KEY, kept | {REPLACED: replaced})
    decoder.config.attn_implementation = NAME  # of its file
    decoder.set_attn_implementation(NAME)
    return model


def use_dense_attention(model: Model) -> Model:
    """Give a model its own attention back: the implementation that `use_sparse_attention`
    replaced. `model.config` then keeps no settings. Without sparse attention it changes nothing.
    """
    decoder = check_model(model, is_switched=False)
    is_sparse, config = decoder.config._attn_implementation == NAME, vars(decoder.config)
    if is_sparse or config.get("attn_implementation") == NAME:  # that of its file
        config.pop("attn_implementation", None)
        saved = config.pop(KEY, None) or {}
        if is_sparse:
            decoder.set_attn_implementation(saved.get(REPLACED, "sdpa"))
    return model


def check_model(model: Any, is_switched: bool = True) -> PreTrainedModel:
    """The model without an adapter's wrapper. Sparse attention fits it, if it is to be switched."""
    if hasattr(model, "get_base_model"):
        model = model.get_base_model()
    check_type("model", model, PreTrainedModel, "a PreTrainedModel of transformers")
    config, name, modules = model.config, type(model).__name__, [*model.modules()]
    sliding_window, problem = getattr(config, "sliding_window", None), None
    is_windowed = sliding_window is not None  # 0 is a window, too
    kinds = getattr(config, "layer_types", None) or ["sliding_attention"] * is_windowed
    if any(isinstance(module, SparseAttention) for module in modules):
        problem = (
            f"not be converted already or of SparseAttention layers, got such a {name}: load it "
            "anew, or set attributes of its SparseAttention layers, as set_dense(model) does"
        )
    elif not is_switched:
        return model
    elif getattr(config, "is_encoder_decoder", False):
        problem = f"be a decoder alone, got {name} with an encoder"
    elif config.get_text_config(decoder=True) is not config:
        problem = f"be a decoder of text: give model.get_decoder(), got {name} of several parts"
    elif not all(getattr(part, "is_causal", True) for part in (config, *modules)):
        problem = f"be causal, got {name} with is_causal=False"
    elif not model._can_set_attn_implementation():
        problem = f"be one that calls AttentionInterface, got {name} with attention of its own"
    elif {*kinds} == {"sliding_attention"}:
        problem = f"be one with full attention, got {name} with {sliding_window=} in all layers"
    if problem:
        raise ValueError(f"model must {problem}")
    check_layers(config, name)
    return model
