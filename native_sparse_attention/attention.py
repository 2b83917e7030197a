"""SparseAttention: the layer. It holds the weights; `ops` has the maths, `cache` the past tokens.

b  batch            n  tokens         h  heads (query heads, or KV heads of keys and values)
w  windows          l  tokens of a window                d  head dimension
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from einops.layers.torch import Rearrange
from rotary_embedding_torch import RotaryEmbedding
from torch import Tensor, nn
from torch.nn import Module

from . import ranking
from .block_sizes import BlockSizes
from .cache.kv_cache import Identity, KVCache, check_cache
from .checks import (
    BRANCHES,
    check_block_indices,
    check_bool,
    check_input,
    check_rows,
    check_type,
    copied,
    refusal,
)
from .compat import refuse_transforms
from .compress import MeanPool, choose_network, compress_sequences, compress_windows, slides
from .config import SETTINGS, AttentionConfig, NSAConfig, changed
from .initialization import Started, gate_linear, reset
from .ops import branches, decode, dispatch, functional
from .ops.call import Call
from .ops.triton import backend as triton_backend
from .rotary import Rotary, make_rotary, rotate
from .varlen import Documents, layer_layout

# the layer's `norm` is a module
FIELDS = SETTINGS | {"norm"}
SHOWN = SETTINGS | {"geometry", "alignment"}


class HeadNorm(nn.RMSNorm):
    """RMSNorm of each head of [.. (h d)]; all heads share the weight [d]."""

    def forward(self, x: Tensor) -> Tensor:
        heads = x.unflatten(-1, (-1, *self.normalized_shape))
        # under autocast the weight is wider than x
        weight = self.weight.to(x.dtype)
        return F.rms_norm(heads, self.normalized_shape, weight, self.eps).flatten(-2)


def find_sparse_layers(
    model: Any, expected: str = "", fits: Callable[[Any], Any] = bool
) -> dict[str, SparseAttention]:
    """The sparse layers of a model by name, of those that fit what is `expected`."""
    check_type("model", model, nn.Module, "an nn.Module")
    named = model.named_modules()
    layers = {n: m for n, m in named if isinstance(m, SparseAttention) and fits(m)}
    if not layers:
        kind = type(model).__name__
        raise ValueError(f"model must have SparseAttention layers{expected}, got none in a {kind}")
    return layers


class SparseAttention(Started):
    """Native Sparse Attention (arXiv 2502.11089): three branches over one input, combined by a
    gate.

    `out_i = sum_b sigmoid(gate_b(x_i)) attention_b(q_i)`, with the branches (1) compressed: learned
    summaries of windows of tokens; (2) selected: the top-n blocks by the scores of branch 1, and
    the query's own block; (3) a sliding window. `docs/semantics.md` has the formulas.

    Args:
        compress_mlp: network `[b h w l d] -> [b h w d]`; keys and values each get a copy. By
            default `native_sparse_attention.compress.default_compress_mlp`, begun as a sum; means
            of windows where compressed keys only rank.
        strategy_combine_mlp: network `[.. dim] -> [.. branches heads]` for the gate, before its
            sigmoid.
        rotary_emb: a RotaryEmbedding of the rotary-embedding-torch package, whose frequencies the
            layer takes, or shares if they are learned; False for no positions.
        rope_theta: the layer's own frequencies are `rope_theta^(-2 i / D)`; 10,000 by default.
        inv_freq: the layer's own frequencies, [pairs]; fewer than D / 2 rotate the first features.
        use_triton_kernel: the published package's spelling of `backend="triton"`.

    The other arguments are the settings of `NSAConfig`, which describes them.

    Attributes:
        dense: whether queries attend to all keys that they may see: with `branches=("selected",)`
            it may be set at any time. The weights and a cache are the same.
    """

    dense = False
    twins: tuple[str, ...] = ("k_compress", "v_compress")
    config: NSAConfig
    to_index: Any
    k_compress: Any
    v_compress: Any
    k_intrablock_positions: Any
    v_intrablock_positions: Any
    # of `view.collect`, while one is open: sees each call and its block indices
    observer: Callable[[Call, AttentionConfig, Tensor | None], None] | None = None
    # of `distributed.context_parallel`: the input is a shard of the sequence
    context: Any = None

    def __init__(
        self,
        dim: int,
        dim_head: int,
        heads: int,
        sliding_window_size: int,
        compress_block_size: int,
        selection_block_size: int,
        num_selected_blocks: int,
        kv_heads: int | None = None,
        num_compressed_mem_kv: int = 1,
        causal: bool = False,
        norm: bool = True,
        use_diff_topk: bool = False,
        use_triton_kernel: bool = False,
        interpolated_importance_score: bool = False,
        query_heads_share_selected_kv: bool = True,
        compress_mlp: Module | None = None,
        compress_mlp_expand_factor: float = 1.0,
        strategy_combine_mlp: Module | None = None,
        *,
        compress_block_sliding_stride: int | None = None,
        importance: str = "logits",
        num_initial_blocks: int = 0,
        num_local_blocks: int = 1,
        selection_stride: int = 1,
        num_selected_groups: int = 0,
        ranking_bits: int = 16,
        branches: Sequence[str] = BRANCHES,
        dense_length: int = 0,
        rank_rotated: bool = False,
        index_dim: int | None = None,
        index_heads: int = 1,
        index_pool: str = "max",
        branch_kv: str = "shared",
        rotary_emb: RotaryEmbedding | Rotary | bool | None = None,
        rope_theta: float | None = None,
        inv_freq: Tensor | None = None,
        qkv_bias: bool = False,
        out_bias: bool = False,
        qk_norm: bool = False,
        qk_norm_eps: float = 1e-6,
        soft_cap: float | None = None,
        attention_sinks: bool = False,
        block_sizes: BlockSizes | None = None,
        recompute: bool = False,
        backend: str = "auto",
    ):
        settings = {name: value for name, value in locals().items() if name in FIELDS}
        if check_bool("use_triton_kernel", use_triton_kernel) and backend not in ("auto", "triton"):
            raise ValueError(f"use_triton_kernel=True asks for backend='triton', got {backend!r}")
        super().__init__()
        config = NSAConfig(**settings | ({"backend": "triton"} if use_triton_kernel else {}))
        self.config = config
        dim, dim_head, heads, kv_heads = config.dim, config.dim_head, config.heads, config.kv_heads
        self.identity = Identity()

        self.norm = nn.RMSNorm(dim) if config.norm else nn.Identity()
        # q, then k and v for all branches, or for each branch: compressed, selected, window
        kv_sets = len(config.branches) if branch_kv == "independent" else 1
        self.qkv_split = (heads * dim_head, *(kv_heads * dim_head,) * (2 * kv_sets))
        self.to_qkv = nn.Linear(dim, sum(self.qkv_split), bias=config.qkv_bias)
        eps = config.qk_norm_eps
        self.q_norm, self.k_norm = (
            HeadNorm(dim_head, eps) if config.qk_norm else None for _ in "qk"
        )
        self.rotary_emb = rotary = make_rotary(dim_head, rotary_emb, rope_theta, inv_freq)

        # index queries of each KV head, then index keys
        self.to_index = None
        if config.is_indexed and config.ranks:
            rotated = 0 if rotary is None or not config.rank_rotated else 2 * len(rotary.freqs)
            # a narrower index rotates by the frequencies of heads of its width
            self.index_every = max(1, rotated // config.index_dim)
            is_part = config.index_dim % 2 == 0 and rotated % config.index_dim == 0
            if config.index_dim < rotated and not is_part:
                expected = f"at least {rotated}, the rotated features, or an even part of it"
                raise refusal("index_dim", expected, config.index_dim)
            width = (kv_heads + config.index_heads) * config.index_dim
            self.to_index = nn.Linear(dim, width, bias=False)
        has_compressed, m = "compressed" in config.branches, config.num_compressed_mem_kv
        memory = torch.zeros(2, kv_heads, m, dim_head)
        # an empty parameter would get no gradient; checkpoints have the name
        memory = nn.Parameter(memory) if m else nn.Buffer(memory)
        self.compress_mem_kv = memory if has_compressed else None
        self.sinks = None
        if config.attention_sinks:
            self.sinks = nn.Parameter(torch.zeros(len(config.branches), heads))

        # compressed keys that only rank blocks have no values, and without a network to train no
        # positions
        network = choose_network(config, compress_mlp)
        learns = has_compressed or any(p.requires_grad for p in network.parameters())
        shape = kv_heads, config.compress_block_size, dim_head
        self.k_intrablock_positions = nn.Parameter(torch.zeros(shape)) if learns else None
        self.v_intrablock_positions = nn.Parameter(torch.zeros(shape)) if has_compressed else None
        self.k_compress = copied(network) if config.compresses else None
        self.v_compress = copied(network) if has_compressed else None
        if not has_compressed:
            self.twins = ()

        self.to_strategy_combine = None
        if len(config.branches) > 1:
            if strategy_combine_mlp is None:
                # it favours the window for any input: a network learns local patterns first
                start = -2.0 if "window" in config.branches else 0.0
                biases = [2.0 if name == "window" else start for name in config.branches]
                strategy_combine_mlp = gate_linear(dim, heads, biases)
            check_type("strategy_combine_mlp", strategy_combine_mlp, Module, "an nn.Module or None")
            self.to_strategy_combine = nn.Sequential(
                strategy_combine_mlp,
                nn.Sigmoid(),
                Rearrange("b n (h s) -> b n h s", h=heads, s=len(config.branches)),
            )
        elif strategy_combine_mlp is not None:
            expected = f"None with branches={config.branches}, one without a gate"
            raise refusal("strategy_combine_mlp", expected, strategy_combine_mlp)

        self.combine_heads = nn.Linear(heads * dim_head, dim, bias=config.out_bias)

    @classmethod
    def from_config(cls, config: NSAConfig, **networks: Any) -> SparseAttention:
        """A layer with these settings. `networks` are the constructor's other arguments:
        compress_mlp, strategy_combine_mlp, rotary_emb, rope_theta, inv_freq."""
        check_type("config", config, NSAConfig, "an NSAConfig")
        layer = cls(**config.values_of(*(FIELDS - {"scale"})), **networks)
        layer.config = replace(layer.config, scale=config.scale)
        return layer

    def __getattr__(self, name: str) -> Any:
        """The settings of `config` by their names, its geometry and its alignment."""
        if name in SHOWN and "config" in self.__dict__:
            return getattr(self.config, name)
        return super().__getattr__(name)

    def __setattr__(self, name: str, value: Any) -> None:
        """To set a setting replaces `config`, if the layer has the weights for it."""
        if name in SETTINGS:
            name, value = "config", changed(self, name, value)
        if name == "dense":  # a module would become a child of that name
            value = check_bool(name, value)
            if value and self.config.branches != ("selected",):
                got = f"got branches={self.config.branches}"
                raise ValueError(f"dense goes with branches=('selected',) only, {got}")
        super().__setattr__(name, value)

    def reset_gate(self) -> None:
        """Restore the gate's initial weights, after a recipe has initialised every `nn.Linear`."""
        if self.to_strategy_combine is not None:
            reset(self.to_strategy_combine)

    def extra_repr(self) -> str:
        c = self.config
        window = f"window={c.sliding_window_size}, " if "window" in c.branches else ""
        groups = f"groups={c.num_selected_groups}, " if c.num_selected_groups else ""
        return (
            f"heads={c.heads}, kv_heads={c.kv_heads}, dim_head={c.dim_head}, "
            f"branches={c.branches}, importance={c.importance!r}, dense_length={c.dense_length}, "
            f"{window}l={c.compress_block_size}, d={c.d}, s={c.selection_block_size}, "
            f"n={c.num_selected_blocks}, {groups}causal={c.causal}, soft_cap={c.soft_cap}, "
            f"backend={c.backend!r}"
        )

    def forward(
        self,
        inp: Tensor,
        cache: KVCache | None = None,
        disable_triton_kernel: bool = False,
        sliding_window_flex_mask: Any = None,
        fine_selection_flex_mask: Callable[..., Any] | None = None,
        return_cache: bool = False,
        *,
        lengths: Sequence[int] | Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        segment_ids: Tensor | None = None,
        mask: Tensor | None = None,
        documents: Documents | None = None,
        block_indices: Tensor | None = None,
        return_block_indices: bool = False,
        ranking_queries: int | Tensor | None = None,
        ranking_weights: str = "output",
        generator: torch.Generator | None = None,
    ) -> Any:
        """Attend over the input, or over a cache followed by the input.

        Args:
            inp: [b, n, dim]. With a cache these are the next n tokens, any number: prefill in
                chunks and decoding are one path.
            cache: a returned cache (`return_cache=True`) or a new `KVCache`. It is updated in
                place. Gradients do not flow to tokens of earlier calls.
            disable_triton_kernel: choose among the other backends.
            sliding_window_flex_mask, fine_selection_flex_mask: of `create_sliding_mask` and
                `create_fine_mask`: these branches run in flex_attention under the given masks.
            return_cache: also return the cache.
            lengths: with a cache, how many of the n tokens are real in each sequence. The others
                are padding on the right: the cache does not keep them, and their output is 0.
            cu_seqlens, segment_ids: packed documents, which do not see each other. cu_seqlens
                [documents + 1], from 0 to total: first positions in [1, total, dim]. segment_ids
                [b, n]: one integer per token, equal within a document.
            mask: [b, n], False for padding on either side. Padding is ignored; its output is 0.
                With a cache, each sequence takes only its real tokens.
            documents: `varlen.Documents` of rows whose documents begin at multiples of s and
                d already.
            block_indices: blocks that the new tokens select, in place of a ranking: [b, n, heads,
                slots], one head for all, for each KV head or each query head; -1 for none. Blocks
                of a document count from its first token, unless `documents` is given. Equal within
                groups of `selection_stride` tokens.
            return_block_indices: also return the selected blocks, as `native_sparse_attention`
                does; given back, they give the same bits.
            ranking_queries: with importance="index", also return its loss, for so many queries of a
                row, drawn with `generator`, or for queries at these positions of the rows of `inp`:
                [m] of every row, or [b, m] of each, -1 for none. Queries of padding do not count.
                The loss is the KL divergence of the index's softmax over blocks from what they are
                worth to exact attention; it reaches `to_index` alone, and costs O(m n).
            ranking_weights: what a block is worth: "output", the norm of what it adds to the
                output, or "mass", its attention probabilities.

        Returns:
            [b, n, dim], or (output, cache), or (output, loss); with `return_block_indices` the
            block indices come last.

        Raises:
            ValueError: an input or cache that does not match, a full cache (nothing is written),
                or a cache for a layer that is not causal.
            NotImplementedError: an explicit backend that cannot run the call.
        """
        config = self.config
        refuse_transforms("SparseAttention")
        disable_triton_kernel = check_bool("disable_triton_kernel", disable_triton_kernel)
        return_cache = check_bool("return_cache", return_cache)
        return_block_indices = check_bool("return_block_indices", return_block_indices)
        bounds = dict(cu_seqlens=cu_seqlens, segment_ids=segment_ids, mask=mask)
        masks = sliding_window_flex_mask, fine_selection_flex_mask
        functional.check_masks(*masks)
        check_input(inp, config.dim, self.to_qkv)
        page = max(config.selection_block_size, config.d)
        cache = check_cache(cache, return_cache, lengths, config.causal, page)
        ranking.check_ranking(ranking_queries, ranking_weights, generator, cache)
        if ranking_queries is not None and self.to_index is None:
            raise ValueError("ranking_queries goes with importance='index'")
        if cache is not None and self.observer is not None:
            raise NotImplementedError("collect sees whole sequences: leave out the cache")
        is_cached = cache is not None
        check_block_indices(inp, block_indices, return_block_indices, is_cached, config)
        if cache is not None and torch.compiler.is_compiling() and not cache.is_fixed:
            from .uncompiled import call_uncompiled

            return call_uncompiled(
                self.forward, inp, cache, disable_triton_kernel, *masks, return_cache,
                lengths=lengths, documents=documents, block_indices=block_indices,
                return_block_indices=return_block_indices, **bounds,
            )  # fmt: skip
        capacity = (cache.max_length or 0) if cache is not None else 0
        is_dense = self.dense or 0 < capacity <= config.dense_length
        if config.takes_blocks and block_indices is None and not is_dense:
            raise ValueError("block_indices must be given with importance='given', got None")
        is_given = block_indices is not None and not is_dense
        layout: Any
        if self.context is None:
            check_rows(inp, is_cached, lengths, documents, **bounds)
            layout, lengths = layer_layout(inp, config.alignment, is_cached, lengths, **bounds)
        else:
            layout = self.context.layout(
                inp, config, documents, ranking_queries, cache=cache,
                sliding_window_flex_mask=masks[0], fine_selection_flex_mask=masks[1],
                collect=self.observer, **bounds,
            )  # fmt: skip
        s = config.selection_block_size
        indices: Any = block_indices
        if layout is not None:
            inp = layout.spread(inp)
            if indices is not None and cache is None:
                indices = layout.spread_blocks(indices, s)
            elif indices is not None:  # blocks of the cache
                indices = layout.spread(indices)
            documents = layout.documents if cache is None else None
        positions = row_positions = None
        if self.context is not None:
            self.context.check_length("inp", inp.shape[1], config)
            positions = row_positions = self.context.positions(inp)
            positions = positions if documents is None else positions - documents.first
        elif documents is not None:
            positions = documents.positions()
        tokens: Any = None if cache is None else cache.new_tokens(inp, lengths)
        start: Any = 0 if tokens is None else tokens.start
        # whether autograd may save what the layer reads of the cache
        saved = cache is not None and torch.is_grad_enabled()
        saved = saved and (inp.requires_grad or any(p.requires_grad for p in self.parameters()))

        x = self.norm(inp if tokens is None else tokens.zero_padding(inp))
        gates = None if self.to_strategy_combine is None else self.to_strategy_combine(x)
        q, *kv = self.project(x)
        if cache is not None:
            cache.bind(self.identity, config.geometry, {"k": kv[0], "v": kv[1]})
        q_rows, k_rows, v_rows = (t.transpose(1, 2) for t in (q, *kv[:2]))
        call = Call(q_rows, k_rows, v_rows, q_offset=start, block_indices=indices)
        backend: Any = config.backend
        if disable_triton_kernel and backend in ("auto", "triton"):
            backend = ("flex", "eager") if q.is_cuda else "eager"
        backend = dispatch.choose(backend, "native_sparse_attention", call, config.for_functions)
        is_plain = masks == (None, None) and backend == "triton" and not saved
        if cache is not None and is_plain and self.supports_decode(cache, call):
            tokens = cache.decoded(tokens, q.device)
            start = tokens.start

        # rotated to their positions, but for the keys and values to compress, `raw`
        tensors, raw = self.split_branches(q, kv)
        names = [name for name in ("q", "k", "window_k") if name in tensors]
        rotated = [tensors[name] for name in names]
        rotated = rotate(self.rotary_emb, rotated, start, positions, backend)
        tensors |= dict(zip(names, rotated, strict=True))

        # keys and queries that rank blocks; a cache keeps keys of 4 bits packed
        packs = cache is not None and self.packs_keys()
        l, d = (s, s) if packs else (config.compress_block_size, config.d)
        ranks = not (self.dense or is_given) or is_cached or ranking_queries is not None
        ranks = ranks or return_block_indices or "compressed" in config.branches
        ranks = config.compresses and (ranks or config.use_diff_topk)
        if ranks and self.to_index is not None:
            pair = self.project_index(x)
            if config.rank_rotated:
                every = self.index_every
                pair = rotate(self.rotary_emb, pair, start, positions, backend, every)
            tensors["cq"], raw = pair[0], {"k": pair[1]}
            if l == d == 1:
                tensors["ck"] = raw.pop("k")
        elif ranks and not config.rank_rotated:
            tensors["cq"] = q
        elif ranks and (packs or not self.ranks_by_tokens()):
            raw = {"k": tensors["k"]}
        else:
            raw = {}

        # keys and values of the whole sequence, or those that the cache holds
        networks = {
            "k": (self.k_compress, self.k_intrablock_positions),
            "v": (self.v_compress, self.v_intrablock_positions),
        }
        ring = leaders = None
        if self.context is not None:
            tensors |= self.context.compress(raw, networks, config, documents)
        elif cache is None:
            tensors |= compress_sequences(raw, networks, config, documents)
        else:
            compress: Any = functools.partial(compress_windows, networks=networks)
            compress = decode.pack_windows if packs else compress
            tensors |= cache.extend(tensors, raw, tokens, l, d, compress, saved, packs)
            if packs and not tokens.decoded:  # blocks are ranked by the keys themselves
                del tensors["ck"]
            if config.leader_stride > 1 and config.ranks:  # rankings that new tokens may share
                heads = config.kv_heads if config.query_heads_share_selected_kv else config.heads
                like = q.new_empty(len(q), heads, 0, config.leader_slots, dtype=torch.int32)
                ring, leaders = cache.rankings(like, tokens)

        inputs = self.call_inputs(tensors, gates)
        if is_given:
            inputs["block_indices"] = indices
            for name in () if "compressed" in config.branches else ("ck", "cq"):
                inputs.pop(name, None)
        if cache is not None and tokens.decoded:
            step = Call(**inputs, lengths=start, counts=tokens.counts, ranking=ring)
            out, written = self.run_step(step, cache, return_block_indices)
            indices = indices if written is None else written
        else:
            call = Call(
                **inputs, q_offset=start, documents=documents, leader_indices=leaders,
                sliding_window_flex_mask=sliding_window_flex_mask,
                fine_selection_flex_mask=fine_selection_flex_mask,
            )  # fmt: skip
            settings = config.for_given if is_given else config.for_functions
            if is_dense:
                settings = config.dense_alone if call.ck is None else config.dense
            if call.has_masks() or documents is not None or is_given:
                # the layer and its cache made all other tensors
                call = functional.checked(call, settings)
            if not (self.dense or is_given):
                branches.warn_dense(call, config.for_functions)
            keep_slots = config.selection_stride > 1 or return_block_indices
            attend = branches.attend if self.context is None else self.context.attend
            out, indices = attend(call, settings, backend, keep_slots)
            if self.observer is not None:
                self.observer(call, settings, indices)
            out = self.tie_unread(out.flatten(2), call)

        if cache is not None:
            if ring is not None and not tokens.decoded:
                shared = branches.rankings_to_share(call, settings, backend, indices)
                if shared is not None:
                    cache.keep_recent({"ranking": shared.transpose(1, 2)}, tokens, 1)
            cache.keep_recent(raw, tokens, l - 1)
            cache.finish(tokens, config.dense_length)
        out = self.combine_heads(out if layout is None else layout.collect(out))
        if layout is None and tokens is not None:
            out = tokens.zero_padding(out)
        elif layout is not None and config.out_bias:  # the output of padding is 0
            out = out.masked_fill((layout.target < 0)[..., None], 0)
        results = [out, cache] if return_cache else [out]
        if ranking_queries is not None:
            if self.context is not None:
                tensors |= {n: self.context.gather(tensors[n]) for n in ("k", "v", "ck")}
            loss = ranking.ranking_loss(
                config, self.sinks, tensors, ranking_queries, documents, generator,
                ranking_weights, layout, row_positions,
            )  # fmt: skip
            results.append(loss)
        if return_block_indices:
            results.append(indices if layout is None else layout.collect_blocks(indices, s))
        return tuple(results) if len(results) > 1 else out

    def project(self, x: Tensor) -> list[Tensor]:
        """Queries [b h n d], and keys and values in turn: a pair for all branches, or one for
        each."""
        # split before heads come first, so that the gradients are joined as they lie
        q, *kv = self.to_qkv(x).split(self.qkv_split, dim=-1)
        if self.q_norm is not None and self.k_norm is not None:
            q, kv = self.q_norm(q), [t if i % 2 else self.k_norm(t) for i, t in enumerate(kv)]
        heads = (-1, self.config.dim_head)
        return [t.unflatten(-1, heads).transpose(1, 2) for t in (q, *kv)]

    def split_branches(
        self, q: Tensor, kv: list[Tensor]
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """The projections that the branches read, named as in a call, and those to compress."""
        apart = self.config.branches if len(kv) > 2 else ()
        sets = [apart.index(name) if name in apart else 0 for name in BRANCHES]
        (raw_k, raw_v), (k, v), (window_k, window_v) = (kv[2 * i : 2 * i + 2] for i in sets)
        tensors = {"q": q, "k": k, "v": v}
        if "window" in self.config.branches and window_k is not k:
            tensors |= {"window_k": window_k, "window_v": window_v}
        return tensors, {"k": raw_k} if self.v_compress is None else {"k": raw_k, "v": raw_v}

    def project_index(self, x: Tensor) -> list[Tensor]:
        """Queries and keys of the index, [b h n d]; no gradient reaches x."""
        heads = self.to_index(x.detach()).unflatten(-1, (-1, self.config.index_dim))
        queries = self.config.kv_heads
        return [t.transpose(1, 2) for t in (heads[..., :queries, :], heads[..., queries:, :])]

    def call_inputs(self, tensors: dict[str, Tensor], gates: Tensor | None) -> dict[str, Any]:
        """The arguments of a call, [b n h d]."""
        inputs: dict[str, Any] = {name: t.transpose(1, 2) for name, t in tensors.items()}
        inputs |= {"branch_gates": gates, "sinks": self.sinks}
        if self.compress_mem_kv is not None and self.config.num_compressed_mem_kv > 0:
            inputs["mem_k"], inputs["mem_v"] = self.compress_mem_kv.to(tensors["q"].dtype)
        if self.ranks_by_tokens():
            inputs.setdefault("ck", inputs["k"])
        elif self.to_index is not None and "ck" in inputs:  # keys of one head rank for all
            inputs["ck"] = inputs["ck"].expand(-1, -1, self.config.kv_heads, -1)
        return inputs

    def run_step(
        self, call: Call, cache: KVCache, return_block_indices: bool
    ) -> tuple[Tensor, Tensor | None]:
        """The output of the decode kernels, and the block indices that they write if asked for.
        They read lengths on the device: a CUDA graph can replay at any of them."""
        config, is_given = self.config, call.block_indices is not None
        settings = config.for_given.but(dense_length=0) if is_given else config.for_steps
        counters = cache.workspace(call.q.device, config.kv_heads, decode.COUNTERS)
        call = call.but(page_table=cache.page_table, counters=counters)
        if return_block_indices and not is_given:
            indices = branches.no_blocks(call, settings, settings.num_selected_blocks)
            call = call.but(new_indices=indices)
        out = decode.run_decode_kernels(settings, functional.expand_heads(call))
        return out.flatten(2), call.new_indices

    def ranks_by_tokens(self) -> bool:
        """Whether the keys that rank blocks, means of single tokens, are the rotated keys."""
        config, network = self.config, self.k_compress
        is_single = config.compress_block_size == config.d == 1 and self.to_index is None
        is_single = is_single and config.rank_rotated and config.compresses
        return is_single and isinstance(network, MeanPool) and slides(network)

    def packs_keys(self) -> bool:
        """Whether a cache keeps the keys that rank blocks packed."""
        return self.config.ranking_bits == 4 and self.ranks_by_tokens() and self.context is None

    def supports_decode(self, cache: KVCache, call: Call) -> bool:
        """Whether the decode kernels support a call without gradients and flex masks: few tokens,
        none at a position where tokens attend to all keys."""
        config = self.config
        if cache.batch is None or call.q.shape[1] > cache.rollback or self.dense:
            return False
        # in a compiled graph the device alone knows the lengths
        held = [cache.least_length] if torch.compiler.is_compiling() else cache.lengths
        if any(length < config.dense_length for length in held):
            return False
        index_dim = config.dim_head if self.to_index is None else config.index_dim
        return not triton_backend.why_not("decode_attention", call, config.for_steps, index_dim)

    def tie_unread(self, out: Tensor, call: Call) -> Tensor:
        """The output, tied to compressed keys or queries that this call may not read, as for a
        sequence of one block: their parameters get zeros, as data-parallel training expects."""
        config = self.config
        unread = None
        if config.branches == ("compressed",):  # reads no rotated tensors
            if self.rotary_emb is not None and self.rotary_emb.freqs.requires_grad:
                unread = call.q
        elif config.use_diff_topk and "compressed" not in config.branches:
            unread = call.ck
        if unread is None or not unread.requires_grad:
            return out
        return out + unread[..., :0].sum()
