"""SparseAttention: the layer. It holds the weights; `ops` has the maths, `cache` the past tokens.

b  batch            n  tokens         h  heads (query heads, or KV heads of keys and values)
w  windows          l  tokens of a window                d  head dimension
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from typing import Any

import torch
from einops.layers.torch import Rearrange
from rotary_embedding_torch import RotaryEmbedding
from torch import Tensor, nn
from torch.nn import Module

from . import decoding, ranking
from .block_sizes import BlockSizes
from .cache.identity import Identity
from .cache.kv_cache import KVCache
from .checks.keywords import refuse
from .checks.networks import check_gate, check_input
from .checks.tensors import BRANCHES, check_bools, check_choice
from .compat.transforms import refuse_transforms
from .compression import CompressionLayer
from .config import SETTINGS, AttentionConfig, NSAConfig, changed
from .gate import default_gate
from .initialization import reset
from .norm import HeadNorm, norm_heads
from .ops import branches, dispatch, nsa
from .ops.call import Call
from .rotary import Rotary, make_rotary, rotated_heads, rotator
from .varlen import Documents, layer_layout


class SparseAttention(CompressionLayer):
    """Native Sparse Attention (arXiv 2502.11089): three branches over one input, combined by a
    gate.

    `out_i = sum_b sigmoid(gate_b(x_i)) attention_b(q_i)`, with the branches (1) compressed: learned
    summaries of windows of tokens; (2) selected: the top-n blocks by the scores of branch 1, and
    the query's own block; (3) a sliding window. `docs/semantics.md` has the formulas.

    Args:
        dim, dim_head, heads: width of the input and output; D, head dimension; H, query heads.
        sliding_window_size: w; branch 3 attends to keys `i - w .. i`.
        compress_block_size, selection_block_size: l and s, tokens of a window and of a block.
        num_selected_blocks: n, ranked blocks of a query; 0 leaves the forced blocks.
        branches: some of "compressed", "selected" and "window", all by default. One alone has no
            gate, and settings of the others have no effect. `("selected",)` is one softmax over the
            initial, local and ranked blocks, with the parameters of dense attention: compressed
            keys only rank, and are means of windows unless `compress_mlp` is given.
        dense_length: queries at positions below it attend to all keys, with `("selected",)`; not
            causal: sequences of at most this length. See `dense`.
        rank_rotated: rank by keys and queries with rotary embedding (not with "compressed").
        kv_heads: K, key and value heads; `heads` by default. Query head h uses KV head
            `h // (H / K)`.
        num_compressed_mem_kv: m, learned memory slots of branch 1, seen by every query.
        causal, norm: whether a query sees no later tokens; RMSNorm of the input.
        use_diff_topk: let gradients reach the selection scores (straight-through gates).
        use_triton_kernel: the published package's spelling of `backend="triton"`.
        interpolated_importance_score: interpolate window scores to tokens before ranking blocks.
        query_heads_share_selected_kv: False lets every query head select for itself.
        compress_mlp: network `[b h w l d] -> [b h w d]`; keys and values each get a copy. By
            default `native_sparse_attention.compress.default_compress_mlp`, begun as a sum.
        compress_mlp_expand_factor: hidden width of the default network over its input width.
        strategy_combine_mlp: network `[.. dim] -> [.. branches heads]` for the gate, before its
            sigmoid.
        compress_block_sliding_stride: d, tokens from window to window; l by default. s and d divide
            one another, and l >= d.
        importance: the score of a block: "logits" (mean logit of its windows), "max" (largest
            logit), "probs" (the paper's softmax mass), or "index": by queries and keys of its own,
            `to_index`, that learn from `ranking_queries` of the forward (not with "compressed").
        index_dim, index_heads, index_pool: D_i, width of index queries (one for each KV head) and
            keys, `dim_head` by default; heads of index keys, 1 or `kv_heads`; "max" or "mean" of a
            block's windows.
        num_initial_blocks: first blocks that every query attends to, not ranked.
        num_local_blocks: blocks ending with the query's own that it attends to, not ranked
            (causal).
        selection_stride: R; R neighbouring tokens share the ranking of the first of them.
            R divides s.
        branch_kv: "shared", or "independent" for keys and values of their own for each branch (the
            paper's section 3.3.3).
        rotary_emb: a RotaryEmbedding of the rotary-embedding-torch package, which layers may share,
            in place of the layer's own; False for no positions.
        rope_theta: the layer's own frequencies are `rope_theta^(-2 i / D)`; 10,000 by default.
        inv_freq: the layer's own frequencies, [pairs]; fewer than D / 2 rotate the first features.
        soft_cap: c, logits x of all branches become `c tanh(x / c)`.
        qkv_bias, out_bias: biases of `to_qkv` and of `combine_heads`.
        qk_norm, qk_norm_eps: RMSNorm of every head of queries and keys, with learned weights
            (`q_norm`, `k_norm` [D]), before the rotary embedding and compression; its epsilon.
        attention_sinks: learn, for each branch and query head, the logit of one more key of value
            0, by which a query may attend to nothing (`sinks` [branches, heads], initially 0).
        block_sizes: tile sizes of the Triton kernels; other backends ignore them.
        recompute: the backward recomputes the branch outputs instead of storing them (Triton only).
        backend: "auto", "triton", "flex" or "eager"; `auto` takes the fastest that can run a call.

    Raises:
        ValueError: an argument out of range, two incompatible arguments, or a network of the wrong
            widths.
    """

    config: NSAConfig
    # of `view.collect`, while one is open: sees each call and its block indices
    observer: Callable[[Call, AttentionConfig, Tensor | None], None] | None = None

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
        (use_triton_kernel,) = check_bools(use_triton_kernel=use_triton_kernel)
        if use_triton_kernel and backend not in ("auto", "triton"):
            raise ValueError(
                "use_triton_kernel=True asks for backend='triton', "
                f"but backend={backend!r} was given"
            )
        super().__init__()
        self.config = NSAConfig(
            dim=dim,
            dim_head=dim_head,
            heads=heads,
            kv_heads=kv_heads,  # type: ignore[arg-type]
            sliding_window_size=sliding_window_size,
            compress_block_size=compress_block_size,
            compress_block_sliding_stride=compress_block_sliding_stride,
            selection_block_size=selection_block_size,
            num_selected_blocks=num_selected_blocks,
            num_compressed_mem_kv=num_compressed_mem_kv,
            causal=causal,
            norm=norm,
            use_diff_topk=use_diff_topk,
            interpolated_importance_score=interpolated_importance_score,
            query_heads_share_selected_kv=query_heads_share_selected_kv,
            compress_mlp_expand_factor=compress_mlp_expand_factor,
            importance=importance,
            num_initial_blocks=num_initial_blocks,
            num_local_blocks=num_local_blocks,
            selection_stride=selection_stride,
            branches=branches,  # type: ignore[arg-type]
            dense_length=dense_length,
            rank_rotated=rank_rotated,
            index_dim=index_dim,  # type: ignore[arg-type]
            index_heads=index_heads,
            index_pool=index_pool,
            branch_kv=branch_kv,
            qkv_bias=qkv_bias,
            out_bias=out_bias,
            qk_norm=qk_norm,
            qk_norm_eps=qk_norm_eps,
            soft_cap=soft_cap,
            attention_sinks=attention_sinks,
            block_sizes=block_sizes,
            recompute=recompute,
            backend="triton" if use_triton_kernel else backend,
        )
        config = self.config
        dim, dim_head, heads, kv_heads = (
            config.dim,
            config.dim_head,
            config.heads,
            config.kv_heads,
        )
        self._dense = False
        rotary = make_rotary(dim_head, rotary_emb, rope_theta, inv_freq)
        self.identity = Identity()

        self.norm = nn.RMSNorm(dim) if config.norm else nn.Identity()
        # q, then k and v for all branches, or for each branch: compressed, selected, window
        dim_kv = kv_heads * dim_head
        kv_sets = len(config.branches) if branch_kv == "independent" else 1
        self.qkv_split = (heads * dim_head, *(dim_kv,) * (2 * kv_sets))
        self.to_qkv = nn.Linear(dim, sum(self.qkv_split), bias=config.qkv_bias)
        eps = config.qk_norm_eps
        self.q_norm, self.k_norm = (
            HeadNorm(dim_head, eps) if config.qk_norm else None for _ in "qk"
        )
        self.rotary_emb = rotary

        # index queries of each KV head, then index keys
        self.to_index = None
        if config.is_indexed and config.ranks:
            rotated = 0 if rotary is None or not config.rank_rotated else 2 * len(rotary.freqs)
            if config.index_dim < rotated:
                raise ValueError(
                    f"index_dim must be at least {rotated}, the features that the rotary embedding "
                    f"turns, got {config.index_dim}"
                )
            width = (kv_heads + config.index_heads) * config.index_dim
            self.to_index = nn.Linear(dim, width, bias=False)
        self.compress_mem_kv = self.make_memory()
        self.sinks = None
        if config.attention_sinks:
            self.sinks = nn.Parameter(torch.zeros(len(config.branches), heads))
        self.make_compression(compress_mlp)

        self.to_strategy_combine = None
        if len(config.branches) > 1:
            if strategy_combine_mlp is None:
                strategy_combine_mlp = default_gate(dim, heads, config.branches)
            else:
                check_gate(strategy_combine_mlp, dim, heads, len(config.branches))
            self.to_strategy_combine = nn.Sequential(
                strategy_combine_mlp, nn.Sigmoid(), Rearrange("b n (h s) -> b n h s", h=heads)
            )
        elif strategy_combine_mlp is not None:
            raise ValueError(
                f"strategy_combine_mlp must be None with branches={config.branches}: one branch "
                "has no gate"
            )

        self.combine_heads = nn.Linear(heads * dim_head, dim, bias=config.out_bias)

    @classmethod
    def from_config(cls, config: NSAConfig, **networks: Any) -> SparseAttention:
        """A layer with these settings. `networks` are the constructor's other arguments:
        compress_mlp, strategy_combine_mlp, rotary_emb, rope_theta, inv_freq."""
        if not isinstance(config, NSAConfig):
            raise ValueError(f"config must be an NSAConfig, got {type(config).__name__}")
        settings = {field.name: getattr(config, field.name) for field in fields(config)}
        scale = settings.pop("scale")
        layer = cls(**settings, **networks)
        layer.config = replace(layer.config, scale=scale)
        return layer

    def __getattr__(self, name: str) -> Any:
        """The settings of `config` by their names."""
        if name in SETTINGS and "config" in self.__dict__:
            return getattr(self.config, name)
        return super().__getattr__(name)

    def __setattr__(self, name: str, value: Any) -> None:
        """To set a setting replaces `config`, if the layer has the weights for it."""
        if name in SETTINGS:
            name, value = "config", changed(self, name, value)
        super().__setattr__(name, value)

    @property
    def geometry(self) -> dict[str, Any]:
        """The settings that the contents of a cache depend on."""
        return self.config.geometry

    @property
    def alignment(self) -> int:
        """Packed documents passed as `documents` begin at multiples of this number."""
        return self.config.alignment

    @property
    def dense(self) -> bool:
        """Whether queries attend to all keys that they may see: with `branches=("selected",)` it
        may be set at any time. The weights and a cache are the same."""
        return self._dense

    @dense.setter
    def dense(self, value: bool) -> None:
        config = self.config
        (dense,) = check_bools(dense=value)
        if dense and config.branches != ("selected",):
            raise ValueError(
                "dense goes with branches=('selected',) only: others are not dense attention with "
                f"any selection, got branches={config.branches}"
            )
        self._dense = dense

    def reset_gate(self) -> None:
        """Restore the gate's initial weights, after a recipe has initialised every `nn.Linear`."""
        if self.to_strategy_combine is not None:
            reset(self.to_strategy_combine)

    def extra_repr(self) -> str:
        config = self.config
        return (
            f"heads={config.heads}, kv_heads={config.kv_heads}, dim_head={config.dim_head}, "
            f"window={config.sliding_window_size}, l={config.compress_block_size}, "
            f"d={config.d}, s={config.selection_block_size}, "
            f"n={config.num_selected_blocks}, causal={config.causal}, soft_cap={config.soft_cap}, "
            f"backend={config.backend!r}"
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
        ranking_queries: int | Tensor | None = None,
        ranking_weights: str = "output",
        generator: torch.Generator | None = None,
        **unknown: Any,
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
            ranking_queries: with importance="index", also return its loss, for so many queries of a
                row, drawn with `generator`, or for queries at these positions [m] of the rows of
                `inp`; with `documents` also [b, m], -1 for none. The loss is
                the KL divergence of the index's softmax over blocks from what they are worth to
                exact attention; it reaches `to_index` alone, and costs O(m n).
            ranking_weights: what a block is worth: "output", the norm of what it adds to the
                output, or "mass", its attention probabilities.

        Returns:
            [b, n, dim], or (output, cache), or (output, loss).

        Raises:
            ValueError: an input or cache that does not match, a full cache (nothing is written),
                or a cache for a layer that is not causal.
            NotImplementedError: an explicit backend that cannot run the call.
        """
        config = self.config
        refuse_transforms("SparseAttention")
        refuse(unknown, self.forward)
        disable_triton_kernel, return_cache = check_bools(
            disable_triton_kernel=disable_triton_kernel, return_cache=return_cache
        )
        check_choice("ranking_weights", ranking_weights, ranking.WEIGHTS)
        ranking.check_generator(generator)
        masks = sliding_window_flex_mask, fine_selection_flex_mask
        nsa.check_flex_masks(*masks)
        check_input(inp, config.dim, self.to_qkv)
        cache = decoding.check_cache(cache, return_cache, lengths, config.causal, config.alignment)
        names = cu_seqlens, segment_ids, mask, documents
        layout, lengths = layer_layout(inp, config.alignment, cache is not None, lengths, *names)
        if layout is not None:
            inp = layout.spread(inp)
            documents = layout.documents if cache is None else None
        backend = self.backend_without_triton(inp) if disable_triton_kernel else config.backend
        if cache is not None and ranking_queries is not None:
            raise ValueError("ranking_queries must be None with a cache")
        if cache is not None and self.observer is not None:
            raise NotImplementedError("collect sees whole sequences: leave out the cache")
        if cache is not None:
            out = decoding.over_cache(self, cache, inp, lengths, backend, masks)
            out = out if layout is None else layout.collect(out)
            return (out, cache) if return_cache else out

        x = self.norm(inp)
        qkv, gates = self.projected(x), self.gates(x)
        if ranking_queries is not None and self.to_index is None:
            raise ValueError("ranking_queries goes with importance='index'")
        q, kv = self.split(qkv)
        name = self.choose_backend(q, kv[0], kv[1], backend, 0)
        positions = None if documents is None else documents.positions()
        tensors, raw = self.rotated(qkv, positions, name)
        if self._dense and ranking_queries is None and not config.use_diff_topk:
            tensors, raw = {name: tensors[name] for name in "qkv"}, {}
        else:
            turn = rotator(self.rotary_emb, 0, positions, name)
            index = ranking.turned(self, ranking.index_of(self, x), turn)
            tensors, raw = ranking.with_index(self, index, tensors, raw)
        tensors |= self.compress_whole(raw, documents, name)
        where: dict[str, Any] = dict(q_offset=0, documents=documents, backend=name)
        found, _ = self.attend(gates, tensors, masks, **where)
        loss = None
        if ranking_queries is not None:
            rows = None if layout is None else layout.target
            loss = ranking.ranking_loss(
                self, tensors, ranking_queries, documents, generator, ranking_weights, rows
            )
        out = self.combine_heads(found if layout is None else layout.collect(found))
        if layout is not None and config.out_bias:  # the output of padding is 0
            out = out.masked_fill((layout.target < 0)[..., None], 0)
        return out if ranking_queries is None else (out, loss)

    def gates(self, x: Tensor) -> Tensor | None:
        """Gates [b n h branches] of the normalized input; None for one branch."""
        return None if self.to_strategy_combine is None else self.to_strategy_combine(x)

    def rotated(
        self, qkv: Tensor, positions: Tensor | None, backend: str
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Rotated queries, keys and values [b h n d] of a whole sequence; and the raw keys and
        values for compression, whose windows have positions of their own."""
        config = self.config
        if config.branch_kv == "shared":
            given = config.heads, config.dim_head, positions, backend
            heads = rotated_heads(self.rotary_emb, qkv, *given)
            if heads is not None:
                tensors = {"q": heads.q, "k": heads.k, "v": heads.v}
                raw = {"q": heads.cq, "k": heads.ck, "v": heads.cv}
                return self.for_compression(tensors, raw)
        q, kv = self.split(qkv)
        return decoding.arranged(self, q, kv, [], rotator(self.rotary_emb, 0, positions, backend))

    def for_compression(
        self, tensors: dict[str, Tensor], raw: dict[str, Tensor]
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Of rotated and of raw tensors: those of the branches, with queries "cq" for compressed
        keys, and those that are compressed."""
        config = self.config
        if not config.compresses:
            return tensors, {}
        if config.rank_rotated:
            return tensors, {} if self.ranks_by_tokens() else {"k": tensors["k"]}
        names = ("k", "v") if "compressed" in config.branches else ("k",)
        return {**tensors, "cq": raw["q"]}, {name: raw[name] for name in names}

    def own(self, kv: list[Tensor], branch: str) -> list[Tensor]:
        """Of keys and values in turn, the pair of a branch, or of another if it is left out."""
        config = self.config
        at = 0
        if config.branch_kv == "independent" and branch in config.branches:
            at = config.branches.index(branch)
        return kv[2 * at : 2 * at + 2]

    def project(self, inp: Tensor) -> tuple[Tensor, Tensor, list[Tensor]]:
        """The normalized input, queries [b h n d], and keys and values in turn."""
        x = self.norm(inp)
        return x, *self.split(self.projected(x))

    def projected(self, x: Tensor) -> Tensor:
        """Queries, and keys and values in turn, [b n (q k v ..)] of the normalized input."""
        qkv = self.to_qkv(x)
        if self.q_norm is None or self.k_norm is None:
            return qkv
        return norm_heads(qkv, self.qkv_split, self.q_norm, self.k_norm)

    def split(self, qkv: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Queries [b h n d], and keys and values in turn."""
        config = self.config
        heads = qkv.unflatten(-1, (-1, config.dim_head)).transpose(1, 2)
        q, *kv = heads.split([width // config.dim_head for width in self.qkv_split], dim=1)
        return q, kv

    def attend(
        self,
        gates: Tensor | None,
        tensors: dict[str, Tensor],
        masks: tuple[Any, Any],
        backend: str,
        dense: bool = False,
        **where: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """The branches of tensors [b h n d] by name, combined by gates: [b n (h d)], and the block
        indices; or dense attention. `where` has the other fields of a `Call`: offset, leaders,
        documents."""
        rows: dict[str, Any] = {name: t.transpose(1, 2) for name, t in tensors.items()}
        if self.ranks_by_tokens():
            rows["ck"] = rows["k"]
        if self.to_index is not None and "ck" in rows:  # index keys of one head rank for all
            rows["ck"] = rows["ck"].expand(-1, -1, self.config.kv_heads, -1)
        call = Call(
            **rows,
            **self.memory(tensors["q"].dtype),
            branch_gates=gates,
            sinks=self.sinks,
            **where,
        )
        config = self.settings(self._dense or dense, ranks=call.ck is not None)
        if masks != (None, None) or call.documents is not None:
            call = nsa.checked(
                call, config, masks
            )  # the layer and its cache made all other tensors
        keep_slots = self.config.selection_stride > 1
        out, indices = branches.attend(call, config, backend, masks, keep_slots)
        if self.observer is not None:
            self.observer(call, config, indices)
        return self.tied(out.flatten(2), call), indices

    def settings(self, dense: bool = False, ranks: bool = True) -> AttentionConfig:
        """What the functions take."""
        config = self.config
        return (config.dense if ranks else config.dense_alone) if dense else config.for_functions

    def choose_backend(
        self, q: Tensor, k: Tensor, v: Tensor, backend: str | tuple[str, ...], start: int | Tensor
    ) -> str:
        """The backend of a call with these heads [b h n d]."""
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        config = self.config.for_functions
        return dispatch.choose(
            backend, "native_sparse_attention", q, k, v=v, q_offset=start, config=config
        )

    def tied(self, out: Tensor, call: Call) -> Tensor:
        """The output, tied to compressed keys or queries that this call may not read, as for a
        sequence of one block: their parameters get zeros, as data-parallel training expects."""
        config = self.config
        if config.branches == ("compressed",):  # reads no rotated tensors
            freqs = None if self.rotary_emb is None else self.rotary_emb.freqs
            unread = None if freqs is None or not freqs.requires_grad else call.q
        else:
            unread = (
                call.ck if config.use_diff_topk and "compressed" not in config.branches else None
            )
        if unread is None or not unread.requires_grad:
            return out
        return out + unread[..., :0].sum()

    def backend_without_triton(self, inp: Tensor) -> str | tuple[str, ...]:
        config = self.config
        if config.backend not in ("auto", "triton"):
            return config.backend
        return ("flex", "eager") if inp.is_cuda else "eager"
