"""SparseAttention: the layer. It holds the weights; `ops` has the maths, `cache` the past tokens.

b  batch            n  tokens         h  heads (query heads, or KV heads of keys and values)
w  windows          l  tokens of a window                d  head dimension
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from typing import Any

import torch
from einops import rearrange
from einops.layers.torch import Rearrange
from rotary_embedding_torch import RotaryEmbedding
from torch import Tensor, nn
from torch.nn import Module

from . import blocks, ranking
from .block_sizes import BlockSizes
from .cache.kv_cache import Identity, KVCache, NewTokens, check_cache
from .checks import (
    BRANCHES,
    check_bools,
    check_choice,
    check_generator,
    check_hidden,
    check_input,
    copied,
)
from .compat import refuse_transforms
from .compress import (
    MeanPool,
    SumPool,
    default_compress_mlp,
    free_window_count,
    slide,
    slides,
    windowed,
    windows_of,
)
from .config import SETTINGS, AttentionConfig, NSAConfig, changed
from .gate import default_gate
from .initialization import Started, reset
from .norm import HeadNorm, norm_heads
from .ops import branches, decode, dispatch, nsa
from .ops.call import Call, DecodeInputs
from .ops.triton import backend as triton_backend
from .ops.triton.elementwise import compress_mean, compress_means
from .rotary import Rotary, make_rotary, rotate, rotated_heads
from .varlen import Documents, layer_layout

FIELDS = frozenset(field.name for field in fields(NSAConfig))


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

    Raises:
        ValueError: an argument out of range, or two incompatible arguments.
    """

    twins: tuple[str, ...] = ("k_compress", "v_compress")
    config: NSAConfig
    to_index: Any
    k_compress: Any
    v_compress: Any
    k_intrablock_positions: Any
    v_intrablock_positions: Any
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
        settings = {name: value for name, value in locals().items() if name in FIELDS}
        (use_triton_kernel,) = check_bools(use_triton_kernel=use_triton_kernel)
        if use_triton_kernel and backend not in ("auto", "triton"):
            raise ValueError(
                "use_triton_kernel=True asks for backend='triton', "
                f"but backend={backend!r} was given"
            )
        super().__init__()
        self.config = NSAConfig(**settings | ({"backend": "triton"} if use_triton_kernel else {}))
        config = self.config
        dim, dim_head = config.dim, config.dim_head
        heads, kv_heads = config.heads, config.kv_heads
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
            self.to_strategy_combine = nn.Sequential(
                strategy_combine_mlp,
                nn.Sigmoid(),
                Rearrange("b n (h s) -> b n h s", h=heads, s=len(config.branches)),
            )
        elif strategy_combine_mlp is not None:
            raise ValueError(
                f"strategy_combine_mlp must be None with branches={config.branches}: one branch "
                "has no gate"
            )

        self.combine_heads = nn.Linear(heads * dim_head, dim, bias=config.out_bias)

    def make_memory(self) -> nn.Parameter | None:
        """The memory slots [2 k m d] of the compressed branch."""
        config = self.config
        m = config.num_compressed_mem_kv
        if "compressed" not in config.branches:
            return None
        memory = torch.zeros(2, config.kv_heads, m, config.dim_head)
        if m:
            return nn.Parameter(memory)
        # empty: a parameter would get no gradient; checkpoints have the name
        self.register_buffer("compress_mem_kv", memory)
        return self.compress_mem_kv

    def make_compression(self, network: Module | None) -> None:
        """The networks of windows and their positions. Compressed keys that only rank blocks have
        no values, and without a network to train no positions."""
        config = self.config
        l, dim_head, kv_heads = config.compress_block_size, config.dim_head, config.kv_heads
        has_branch = "compressed" in config.branches
        if network is None and has_branch:
            factor = config.compress_mlp_expand_factor
            check_hidden("compress_mlp_expand_factor", factor, l * dim_head)
            network = default_compress_mlp(dim_head, l, factor)
        elif network is None:
            network = MeanPool()
        elif config.importance == "index":
            raise ValueError("compress_mlp must be None with importance='index', whose keys learn")
        else:
            gets_gradient = has_branch or (config.ranks and config.use_diff_topk)
            if not gets_gradient and any(p.requires_grad for p in network.parameters()):
                raise ValueError(
                    "compress_mlp must have no parameters to train where compressed keys only rank "
                    "blocks and use_diff_topk=False, since no gradient reaches them: give "
                    "MeanPool() or freeze it"
                )
        learns = has_branch or any(p.requires_grad for p in network.parameters())

        def positions(exist: bool) -> nn.Parameter | None:
            return nn.Parameter(torch.zeros(kv_heads, l, dim_head)) if exist else None

        self.k_intrablock_positions = positions(learns)
        self.v_intrablock_positions = positions(has_branch)
        self.k_compress = copied(network) if config.compresses else None
        self.v_compress = copied(network) if has_branch else None
        if not has_branch:
            self.twins = ()

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
        disable_triton_kernel, return_cache = check_bools(
            disable_triton_kernel=disable_triton_kernel, return_cache=return_cache
        )
        check_choice("ranking_weights", ranking_weights, ranking.WEIGHTS)
        check_generator(generator)
        masks = sliding_window_flex_mask, fine_selection_flex_mask
        nsa.check_flex_masks(*masks)
        check_input(inp, config.dim, self.to_qkv)
        cache = check_cache(cache, return_cache, lengths, config.causal, config.alignment)
        if ranking_queries is not None and cache is not None:
            raise ValueError("ranking_queries must be None with a cache")
        if ranking_queries is not None and self.to_index is None:
            raise ValueError("ranking_queries goes with importance='index'")
        if cache is not None and self.observer is not None:
            raise NotImplementedError("collect sees whole sequences: leave out the cache")
        if cache is not None and torch.compiler.is_compiling() and not cache.is_fixed:
            from .uncompiled import call_uncompiled

            return call_uncompiled(
                self.forward, inp, cache, disable_triton_kernel, *masks, return_cache,
                lengths=lengths, cu_seqlens=cu_seqlens, segment_ids=segment_ids, mask=mask,
                documents=documents,
            )  # fmt: skip
        names = cu_seqlens, segment_ids, mask, documents
        layout, lengths = layer_layout(inp, config.alignment, cache is not None, lengths, *names)
        if layout is not None:
            inp = layout.spread(inp)
            documents = layout.documents if cache is None else None

        # queries, keys and values of these tokens, rotated to their positions
        tokens: Any = None if cache is None else cache.new_tokens(inp, lengths)
        x = self.norm(inp if tokens is None else tokens.zero_padding(inp))
        qkv, gates = self.project(x), self.gates(x)
        q, kv = self.split(qkv)
        start = 0 if tokens is None else tokens.start
        if cache is not None:
            cache.bind(self.identity, config.geometry, {"k": kv[0], "v": kv[1]})
        backend = self.choose_backend(q, kv, start, disable_triton_kernel)
        if cache is not None and self.supports_decode(cache, q, kv, backend, masks):
            tokens = cache.decoded(tokens, q.device)
            start = tokens.start
        positions = None if documents is None else documents.positions()
        ranks = not self._dense or cache is not None or config.use_diff_topk
        ranks = ranks or ranking_queries is not None
        tensors, raw = self.rotate(x, qkv, start, positions, backend, ranks)

        # what they see: the whole sequence, or what the cache holds
        leaders = None
        if cache is None:
            tensors |= self.compress_whole(raw, documents, backend)
        else:
            tensors |= self.extend(cache, tokens, tensors, raw)
            leaders = self.shared_rankings(cache, tokens, q)
        if cache is not None and tokens.decoded:
            out, indices = self.decode(gates, tensors, cache, tokens, leaders), None
        else:
            dense = cache is not None and 0 < (cache.max_length or 0) <= config.dense_length
            out, indices = self.attend(
                gates, tensors, masks, backend, dense, q_offset=start, documents=documents,
                leader_indices=leaders,
            )  # fmt: skip
        if cache is not None:
            if indices is not None and self.shares_rankings:
                rankings = rearrange(indices, "b n h s -> b h n s")
                cache.keep_recent({"ranking": rankings}, tokens, 1)
            cache.keep_recent(raw, tokens, config.compress_block_size - 1)
            cache.finish(tokens, config.dense_length)

        out = self.combine_heads(out if layout is None else layout.collect(out))
        if layout is None and tokens is not None:
            out = tokens.zero_padding(out)
        elif layout is not None and config.out_bias:  # the output of padding is 0
            out = out.masked_fill((layout.target < 0)[..., None], 0)
        if ranking_queries is not None:
            rows = None if layout is None else layout.target
            return out, ranking.ranking_loss(
                config, self.sinks, tensors, ranking_queries, documents, generator,
                ranking_weights, rows,
            )  # fmt: skip
        return (out, cache) if return_cache else out

    # projection

    def project(self, x: Tensor) -> Tensor:
        """Queries, and keys and values in turn, [b n (q k v ..)] of the normalized input."""
        qkv = self.to_qkv(x)
        if self.q_norm is None or self.k_norm is None:
            return qkv
        return norm_heads(qkv, self.qkv_split, self.q_norm, self.k_norm)

    def split(self, qkv: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Queries [b h n d], and keys and values in turn."""
        dim_head = self.config.dim_head
        heads = qkv.unflatten(-1, (-1, dim_head)).transpose(1, 2)
        q, *kv = heads.split([width // dim_head for width in self.qkv_split], dim=1)
        return q, kv

    def gates(self, x: Tensor) -> Tensor | None:
        """Gates [b n h branches] of the normalized input; None for one branch."""
        return None if self.to_strategy_combine is None else self.to_strategy_combine(x)

    def branch_pair(self, kv: list[Tensor], branch: str) -> list[Tensor]:
        """Of keys and values in turn, the pair of a branch, or of another if it is left out."""
        config = self.config
        index = 0
        if config.branch_kv == "independent" and branch in config.branches:
            index = config.branches.index(branch)
        return kv[2 * index : 2 * index + 2]

    def rotate(
        self,
        x: Tensor,
        qkv: Tensor,
        start: int | Tensor,
        positions: Tensor | None,
        backend: str,
        ranks: bool = True,
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Tensors [b h n d] of the branches by name, with queries and keys rotated to `positions`
        [b n] or to those from `start` on; and the keys and values that are compressed. Without
        `ranks`, those of dense attention alone.

        Windows have positions of their own: their keys and values, and the queries "cq" for them,
        are not rotated, unless with `rank_rotated`. With index queries [b k n d] and index keys
        [b 1|k n d] of x these take their place; keys of single tokens are "ck" as they are."""
        config, rotary = self.config, self.rotary_emb
        heads = None
        if config.branch_kv == "shared" and isinstance(start, int) and start == 0:
            shape = config.heads, config.dim_head
            heads = rotated_heads(rotary, qkv, *shape, positions, backend)
        if heads is None:
            q, kv = self.split(qkv)
            k, v = self.branch_pair(kv, "selected")
            window_k, window_v = self.branch_pair(kv, "window")
            has_window = "window" in config.branches and window_k is not k
            keys = [k, window_k] if has_window else [k]
            rotated_q, k, *window_heads = rotate(rotary, [q, *keys], start, positions, backend)
            tensors = {"q": rotated_q, "k": k, "v": v}
            if has_window:
                tensors |= {"window_k": window_heads[0], "window_v": window_v}
            raw = dict(zip("kv", self.branch_pair(kv, "compressed"), strict=True))
        else:
            q, tensors = heads.cq, {"q": heads.q, "k": heads.k, "v": heads.v}
            raw = {"k": heads.ck, "v": heads.cv}
        if not config.compresses or not ranks:
            return tensors, {}
        if self.to_index is not None and config.ranks:
            # the gradient of the index stops here
            index = self.to_index(x.detach()).unflatten(-1, (-1, config.index_dim)).transpose(1, 2)
            pair = [index[:, : config.kv_heads], index[:, config.kv_heads :]]
            if config.rank_rotated:
                pair = rotate(rotary, pair, start, positions, backend)
            tensors["cq"] = pair[0]
            if config.compress_block_size == config.d == 1:
                return {**tensors, "ck": pair[1]}, {}
            return tensors, {"k": pair[1]}
        if config.rank_rotated:
            return tensors, {} if self.ranks_by_tokens() else {"k": tensors["k"]}
        names = ("k", "v") if "compressed" in config.branches else ("k",)
        return {**tensors, "cq": q}, {name: raw[name] for name in names}

    # compression

    def ranks_by_tokens(self) -> bool:
        """Whether the keys that rank blocks are the rotated keys themselves."""
        config = self.config
        sizes = config.compress_block_size, config.d
        plain = config.rank_rotated and sizes == (1, 1) and config.compresses
        plain = plain and self.to_index is None
        return plain and isinstance(self.k_compress, MeanPool) and slides(self.k_compress)

    def compressor(self, name: str) -> tuple[Any, Tensor | None]:
        """The network and the positions of keys "k" or values "v"."""
        if name == "k":
            return self.k_compress, self.k_intrablock_positions
        return self.v_compress, self.v_intrablock_positions

    def compress(self, windows: dict[str, Tensor]) -> dict[str, Tensor]:
        """Summaries [b h w d] of windows [b h w l d], as "ck" and "cv"."""
        compressed = {}
        for name, t in windows.items():
            network, positions = self.compressor(name)
            if positions is not None:
                t = t + rearrange(positions.to(t.dtype), "h l d -> h 1 l d")
            b, h, w, _, d = t.shape
            summary = compressed[f"c{name}"] = network(t).to(t.dtype)
            if summary.shape != (b, h, w, d):
                raise ValueError(
                    "compress_mlp must map [b h w l d] to [b h w d], "
                    f"got {list(t.shape)} to {list(summary.shape)}"
                )
        return compressed

    def compress_whole(
        self,
        raw: dict[str, Tensor],
        documents: Documents | None,
        backend: str,
    ) -> dict[str, Tensor]:
        """Summaries of whole sequences "k" and "v" [b h n d]. Sliding networks read the sequence
        without copying windows; a kernel computes means."""
        config = self.config
        if not raw:
            return {}
        compressed: dict[str, Tensor] = {}
        l, d = config.compress_block_size, config.d
        nets: list[Any] = [net for net, _ in map(self.compressor, raw)]
        sliding: list[Any] = [net for net in nets if slides(net)]
        count = free_window_count(raw["k"].shape[2], d, config.causal)
        if count is not None or documents is not None or l % d or len(sliding) < len(raw):
            windows = {
                n: windows_of(t, l, d, config.causal, documents, count) for n, t in raw.items()
            }
            return self.compress(windows)
        k, v = raw["k"], raw.get("v")
        if backend == "triton":
            n = blocks.num_windows(k.shape[2], d, causal=config.causal)
            if v is not None:
                positions = self.k_intrablock_positions, self.v_intrablock_positions
                means = compress_means(k, v, *positions, l, d, n)
                for name, mean, net in zip(("ck", "cv"), means, sliding, strict=True):
                    is_sum = isinstance(net, SumPool)
                    compressed[name] = mean * (l * net.gain).to(mean.dtype) if is_sum else mean
                return compressed
            averaged = all(isinstance(net, MeanPool) for net in sliding)
            averaged = averaged and not config.use_diff_topk
            if averaged and (self.to_index is None or not torch.is_grad_enabled()):
                return {"ck": compress_mean([k.detach()], [], l, d, n)[0]}
        for (name, t), net in zip(raw.items(), sliding, strict=True):
            _, p = self.compressor(name)
            compressed[f"c{name}"] = slide(net, windowed(t, l, d, config.causal), p, l, d)
        return compressed

    def memory(self, dtype: torch.dtype) -> dict[str, Any]:
        if self.compress_mem_kv is None or self.config.num_compressed_mem_kv == 0:
            return {"mem_k": None, "mem_v": None}
        mem_k, mem_v = self.compress_mem_kv.to(dtype)
        return {"mem_k": mem_k, "mem_v": mem_v}

    # the cache

    @property
    def shares_rankings(self) -> bool:
        """Whether tokens share the rankings of earlier ones, which the cache keeps."""
        return self.config.selection_stride > 1 and self.config.ranks

    def extend(
        self,
        cache: KVCache,
        tokens: NewTokens,
        tensors: dict[str, Tensor],
        raw: dict[str, Tensor],
    ) -> dict[str, Tensor]:
        """Write new tokens and the windows that they complete to the cache. Returns what attention
        reads of it."""
        l, d, saved = self.config.compress_block_size, self.config.d, self.is_trained(tensors["k"])
        names = ("k", "v", "window_k", "window_v", "ck")
        new = {name: tensors[name] for name in names if name in tensors}
        streams = cache.append(new, tokens, saved=saved)
        if not raw:
            return streams
        if tokens.host is not None and tokens.width(d) == 0 and not saved:
            summaries = {f"c{name}": t[:, :, :0] for name, t in raw.items()}
        else:
            summaries = self.compress(cache.windows(raw, tokens, l, d))
        return streams | cache.append(summaries, tokens, d, saved)

    def shared_rankings(self, cache: KVCache, tokens: NewTokens, q: Tensor) -> Tensor | None:
        """Block indices of earlier tokens, which new ones may share: the ring buffer of the decode
        kernels, or those of the last token [b h n]."""
        config = self.config
        if not self.shares_rankings:
            return None
        ranks = config.kv_heads if config.query_heads_share_selected_kv else config.heads
        like = q.new_empty(len(q), ranks, 0, config.num_selected_blocks, dtype=torch.int32)
        ring = cache.ring({"ranking": like}, 1)["ranking"]
        if tokens.decoded:
            return ring
        if isinstance(tokens.start, int) and tokens.start == 0:
            return None
        return cache.recent("ranking", tokens, 1)[:, :, 0]

    def is_trained(self, inp: Tensor) -> bool:
        """Whether autograd may save the tensors that the layer reads."""
        if not torch.is_grad_enabled():
            return False
        return inp.requires_grad or any(p.requires_grad for p in self.parameters())

    def dense_below(self, cache: KVCache) -> int:
        """The length below which some new token attends to all keys; 0 if there is none."""
        if self._dense:
            return sys.maxsize
        length = self.config.dense_length
        if torch.compiler.is_compiling():  # there the device alone knows the lengths
            return 0 if length and cache.least_length >= length else length
        return length if any(held < length for held in cache.lengths) else 0

    def supports_decode(
        self,
        cache: KVCache,
        q: Tensor,
        kv: list[Tensor],
        backend: str,
        masks: tuple[Any, Any] = (None, None),
    ) -> bool:
        """Whether the decode kernels support this call: few tokens, none at a position where tokens
        attend to all keys, no gradients, no flex masks."""
        config = self.config
        if cache.batch is None or q.shape[2] > cache.rollback or self.is_trained(q):
            return False
        if masks != (None, None) or backend != "triton":
            return False
        if self.to_index is not None and config.index_dim != config.dim_head:
            return False
        if self.dense_below(cache):
            return False
        q, k, v = (t.transpose(1, 2) for t in (q, *kv[:2]))
        call = Call(q, k, v)
        return not triton_backend.why_not("decode_attention", call, config.for_steps)

    # attention

    def choose_backend(
        self, q: Tensor, kv: list[Tensor], start: int | Tensor, disable_triton: bool
    ) -> str:
        """The backend of a call with these heads [b h n d]."""
        config = self.config
        backend: str | tuple[str, ...] = config.backend
        if disable_triton and backend in ("auto", "triton"):
            backend = ("flex", "eager") if q.is_cuda else "eager"
        q, k, v = (t.transpose(1, 2) for t in (q, *kv[:2]))
        call = Call(q, k, v, q_offset=start)
        return dispatch.choose(backend, "native_sparse_attention", call, config.for_functions)

    def call_tensors(self, tensors: dict[str, Tensor]) -> dict[str, Any]:
        """Tensors [b h n d] as the functions take them, [b n h d], and the memory."""
        rows: dict[str, Any] = {name: t.transpose(1, 2) for name, t in tensors.items()}
        if self.ranks_by_tokens():
            rows["ck"] = rows["k"]
        if self.to_index is not None and "ck" in rows:  # index keys of one head rank for all
            rows["ck"] = rows["ck"].expand(-1, -1, self.config.kv_heads, -1)
        return rows | self.memory(tensors["q"].dtype)

    def attend(
        self,
        gates: Tensor | None,
        tensors: dict[str, Tensor],
        masks: tuple[Any, Any],
        backend: str,
        dense: bool = False,
        **layout: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """The branches of tensors [b h n d] by name, combined by gates: [b n (h d)], and the block
        indices; or dense attention. `layout` has the other fields of a `Call`: offset, leaders,
        documents."""
        rows = self.call_tensors(tensors)
        call = Call(**rows, branch_gates=gates, sinks=self.sinks, **layout)
        config = self.config.for_functions
        if self._dense or dense:
            config = self.config.dense_alone if call.ck is None else self.config.dense
        if masks != (None, None) or call.documents is not None:
            # the layer and its cache made all other tensors
            call = nsa.checked(call, config, masks)
        keep_slots = self.config.selection_stride > 1
        out, indices = branches.attend(call, config, backend, masks, keep_slots)
        if self.observer is not None:
            self.observer(call, config, indices)
        return self.tie_unread(out.flatten(2), call), indices

    def decode(
        self,
        gates: Tensor | None,
        tensors: dict[str, Tensor],
        cache: KVCache,
        tokens: Any,
        rankings: Tensor | None,
    ) -> Tensor:
        """`attend` of few new tokens by the decode kernels, over the storage of the cache. They
        read lengths on the device: a CUDA graph can replay at any of them."""
        config, rows = self.config, self.call_tensors(tensors)
        if self.to_index is not None and "cq" in rows:  # the kernels have a query for each head
            rows["cq"] = rows["cq"].repeat_interleave(config.heads // config.kv_heads, dim=2)
        counters = cache.workspace(rows["q"].device, config.kv_heads, decode.COUNTERS)
        call = DecodeInputs(
            **rows, branch_gates=gates, sinks=self.sinks, lengths=tokens.start,
            counts=tokens.counts, page_table=cache.page_table, counters=counters, ranking=rankings,
        )  # fmt: skip
        return decode.run_decode_kernels(config.for_steps, call).flatten(2)

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
