"""Transformer: a small language model on SparseAttention, or on its dense twin.

b  batch    n  tokens    h  heads    d  head dimension
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from einops import rearrange
from rotary_embedding_torch import RotaryEmbedding
from torch import Tensor, nn
from torch.nn import Module, ModuleList
from torch.utils.checkpoint import checkpoint

from .attention import SparseAttention
from .cache.kv_cache import Identity, KVCache, check_cache, check_caches, check_room
from .cache.paged import PagedKVCache
from .checks import (
    check_bool,
    check_bools,
    check_choice,
    check_groups,
    check_hidden,
    check_ids,
    check_input,
    check_int,
    check_ints,
    check_keywords,
    check_layers,
    check_ranks,
    check_rows,
    check_share_ranking,
    check_type,
    copied,
    refusal,
)
from .config import GIVEN, LOCAL, SETTINGS, NSAConfig
from .generate import check_prompt, check_stop, generate, token_sampler
from .initialization import Started
from .masks import create_fine_mask, create_sliding_mask
from .ops.reference import keep_document
from .presets import PRESETS, RECOMMENDED
from .ranking import check_ranking, sampled
from .rotary import Rotary, make_rotary, rotate
from .varlen import Documents, Layout, layer_layout

DEFAULT_SPARSE_ATTN = dict(
    sliding_window_size=32,
    compress_block_size=8,
    compress_block_sliding_stride=4,
    selection_block_size=8,
    num_selected_blocks=4,
)

# what an `NSAConfig` decides, where it is left at
USUAL_SHAPE = dict(dim_head=64, heads=8, kv_heads=None, causal=True)

# the label that cross_entropy ignores
NO_LABEL = -100


class Attention(Started):
    """Dense attention, called as SparseAttention: grouped queries, rotary embedding, cache. Its
    state-dict names are those of the published package."""

    def __init__(
        self, dim: int, dim_head: int = 64, heads: int = 8, causal: bool = True,
        kv_heads: int | None = None, *, rotary_emb: RotaryEmbedding | Rotary | bool | None = None,
        rope_theta: float | None = None, inv_freq: Tensor | None = None,
    ):  # fmt: skip
        super().__init__()
        dim, dim_head, heads = check_ints(1, dim=dim, dim_head=dim_head, heads=heads)
        kv_heads = heads if kv_heads is None else check_int("kv_heads", kv_heads, 1)
        check_groups(heads, kv_heads)
        self.dim = dim
        self.dim_head = dim_head
        self.causal = check_bool("causal", causal)
        self.grouped = kv_heads != heads
        self.identity = Identity()
        self.geometry = {"kv_heads": kv_heads, "dim_head": dim_head}

        self.norm = nn.RMSNorm(dim)
        self.rotary_embed = make_rotary(dim_head, rotary_emb, rope_theta, inv_freq)
        self.to_q = nn.Linear(dim, heads * dim_head, bias=False)
        self.to_k = nn.Linear(dim, kv_heads * dim_head, bias=False)
        self.to_v = nn.Linear(dim, kv_heads * dim_head, bias=False)
        self.to_out = nn.Linear(heads * dim_head, dim, bias=False)

    def forward(
        self, x: Tensor, cache: KVCache | None = None, *,
        lengths: Sequence[int] | Tensor | None = None, documents: Documents | None = None,
    ) -> Tensor:  # fmt: skip
        """[b, n, dim] -> [b, n, dim]. Arguments as SparseAttention's; `documents` or a cache."""
        check_input(x, self.dim, self.to_q, "x")
        cache = check_cache(cache, False, lengths, self.causal)
        check_rows(x, cache is not None, lengths, documents)
        if cache is not None and torch.compiler.is_compiling() and not cache.is_fixed:
            from .uncompiled import call_uncompiled

            return call_uncompiled(self.forward, x, cache, lengths=lengths)
        tokens: Any = None if cache is None else cache.new_tokens(x, lengths)
        x = self.norm(x if tokens is None else tokens.zero_padding(x))
        q, k, v = (
            rearrange(project(x), "b n (h d) -> b h n d", d=self.dim_head)
            for project in (self.to_q, self.to_k, self.to_v)
        )
        start = 0 if tokens is None else tokens.start
        positions = None if documents is None else documents.positions()
        q, k = rotate(self.rotary_embed, [q, k], start, positions)
        mask = None
        if documents is not None:  # positions without a token see themselves
            j = torch.arange(q.shape[2], device=q.device)
            visible = (j <= j[:, None]) | (not self.causal)
            mask = keep_document(visible, j, documents, slice(None)) | (j == j[:, None])
            mask = mask[:, None]
        if cache is not None:
            new = {"k": k, "v": v}
            cache.bind(self.identity, self.geometry, new)
            saved = torch.is_grad_enabled() and any(p.requires_grad for p in self.parameters())
            streams = cache.append(new, tokens, saved=saved or q.requires_grad)
            k, v = streams["k"], streams["v"]
            # new sequences need only the causal triangle; otherwise tokens also see cached tokens
            if isinstance(start, Tensor) or start > 0:
                i = torch.arange(q.shape[2], device=q.device)[:, None]
                i = i + (start[:, None, None, None] if isinstance(start, Tensor) else start)
                mask = torch.arange(k.shape[2], device=q.device) <= i
        out = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=self.causal and mask is None, enable_gqa=self.grouped
        )
        out = self.to_out(rearrange(out, "b h n d -> b n (h d)"))
        if cache is not None:
            out = tokens.zero_padding(out)
            cache.finish(tokens)
        return out


def FeedForward(dim: int, expansion_factor: float = 4.0) -> nn.Sequential:
    dim_hidden = check_hidden("ff_expansion_factor", expansion_factor, dim)
    return nn.Sequential(
        nn.RMSNorm(dim), nn.Linear(dim, dim_hidden), nn.GELU(), nn.Linear(dim_hidden, dim)
    )


class Block(nn.Sequential):
    """A layer of a Transformer, `x = x + attention(x); x = x + feed_forward(x)`: [b, n, dim] ->
    [b, n, dim], with what the attention returns besides its output. It unpacks into the two."""

    def forward(self, x: Tensor, **call: Any) -> Any:  # type: ignore[override]
        attention, feed_forward = self
        out = attention(x, **call)
        out, *others = out if isinstance(out, tuple) else (out,)
        x = x + out
        x = x + feed_forward(x)
        return (x, *others) if others else x


def layer_settings(
    shape: dict[str, Any], config: NSAConfig | str | None, kwargs: Any
) -> tuple[NSAConfig, dict[str, Any]]:
    """The settings of sparse layers, and the arguments of SparseAttention besides them."""
    if isinstance(config, NSAConfig):
        for name, usual in (("dim", None), *USUAL_SHAPE.items()):
            value = shape[name]
            if name != "causal" and value is not None:  # 4.0 equals 4, but is no integer
                value = check_int(name, value, 1)
            if value not in (usual, getattr(config, name)):
                raise refusal(name, f"that of config, {getattr(config, name)}", value)
        return config, {}
    if kwargs is None:
        name = RECOMMENDED if config is None else config
        check_choice("config", name, PRESETS)
        return NSAConfig.preset(name, **shape), {}
    networks = "compress_mlp", "strategy_combine_mlp", "rotary_emb", "rope_theta", "inv_freq"
    check_keywords(kwargs, (SETTINGS | {"norm", *networks}) - shape.keys())
    sizes: dict[str, Any] = dict(DEFAULT_SPARSE_ATTN)
    if "compress_block_size" in kwargs:
        del sizes["compress_block_sliding_stride"]
    settings = sizes | {name: kwargs[name] for name in kwargs if name in SETTINGS | {"norm"}}
    return NSAConfig(**shape, **settings), {n: kwargs[n] for n in kwargs if n not in settings}


class Transformer(Started):
    """A decoder-only (or, with `causal=False`, bidirectional) language model, with the state-dict
    names of the published package's Transformer.

    Args:
        num_tokens: size of the vocabulary.
        dim, dim_head, heads, kv_heads: as in SparseAttention; depth: number of layers.
        ff_expansion_factor: hidden width of a feed-forward over dim.
        use_sparse_attn: SparseAttention, or dense attention; a `config` asks for SparseAttention.
        causal: whether a token sees no later tokens.
        use_flex_sliding_window, use_flex_fine_selection: run these branches in flex_attention,
            under masks that a forward makes for all its layers; with gradients on CUDA only. A
            forward with a cache or with packed documents uses the layer's own backend.
        use_triton_fine_selection: `backend="triton"` for the sparse layers.
        sparse_attn_kwargs: arguments of SparseAttention, as the published package takes them;
            `DEFAULT_SPARSE_ATTN` has the defaults of those left out. A compress_block_size without
            a stride is also the stride. Each layer copies the networks and shares a rotary_emb. A
            dense model warns that it does not use them.
        config: settings of the sparse layers in place of `sparse_attn_kwargs`: the name of a
            preset, "one-softmax" by default; or an `NSAConfig`, which decides dim_head, heads,
            kv_heads and causal.
        activation_checkpointing: recompute each layer in the backward pass, for less memory.
        local_layers: indices of sparse layers that rank no blocks (`num_selected_blocks=0`), and
            attend to initial and local ones; -1 is the last.
        share_ranking: indices of the sparse layers that rank blocks; each other one but those of
            `local_layers` takes the block indices of the last of them before it
            (`importance="given"`). All rank by default.
        rotary_emb, rope_theta, inv_freq: as in SparseAttention, for sparse and dense layers.

    Arguments out of range, and ids, caches or prompts that do not match, are a ValueError.
    """

    def __init__(
        self,
        num_tokens: int,
        dim: int,
        depth: int,
        dim_head: int = 64,
        heads: int = 8,
        kv_heads: int | None = None,
        ff_expansion_factor: float = 4.0,
        use_sparse_attn: bool = False,
        causal: bool = True,
        use_flex_sliding_window: bool = False,
        use_flex_fine_selection: bool = False,
        use_triton_fine_selection: bool = False,
        sparse_attn_kwargs: dict[str, Any] | None = None,
        *,
        config: NSAConfig | str | None = None,
        activation_checkpointing: bool = False,
        local_layers: Sequence[int] = (),
        share_ranking: Sequence[int] | None = None,
        rotary_emb: RotaryEmbedding | Rotary | bool | None = None,
        rope_theta: float | None = None,
        inv_freq: Tensor | None = None,
    ):
        super().__init__()
        num_tokens, dim, depth = check_ints(1, num_tokens=num_tokens, dim=dim, depth=depth)
        check_bools(
            use_sparse_attn=use_sparse_attn, causal=causal,
            use_flex_sliding_window=use_flex_sliding_window,
            use_flex_fine_selection=use_flex_fine_selection,
            use_triton_fine_selection=use_triton_fine_selection,
            activation_checkpointing=activation_checkpointing,
        )  # fmt: skip
        if use_flex_fine_selection and use_triton_fine_selection:
            names = "use_flex_fine_selection and use_triton_fine_selection"
            raise ValueError(f"{names} are two ways to compute one branch: give one")
        check_type("sparse_attn_kwargs", sparse_attn_kwargs, Mapping, "a dict", or_none=True)
        if sparse_attn_kwargs is not None and config is not None:
            raise ValueError("config and sparse_attn_kwargs are two ways to set layers: give one")
        if sparse_attn_kwargs is not None and not use_sparse_attn:
            told = "sparse_attn_kwargs are not used by a Transformer with use_sparse_attn=False"
            warnings.warn(told, stacklevel=2)
        use_sparse_attn |= config is not None
        shape: dict[str, Any] = dict(
            dim=dim, dim_head=dim_head, heads=heads, kv_heads=kv_heads, causal=causal
        )
        if use_sparse_attn:
            if use_flex_sliding_window and config is None:  # the published form has a window
                sparse_attn_kwargs = sparse_attn_kwargs or {}
            layer_config, networks = layer_settings(shape, config, sparse_attn_kwargs)
            causal = layer_config.causal
        rotary: dict[str, Any] = dict(
            rotary_emb=rotary_emb, rope_theta=rope_theta, inv_freq=inv_freq
        )
        rotary = {name: value for name, value in rotary.items() if value is not None}
        self.causal, self.use_sparse_attn = causal, use_sparse_attn
        self.use_flex_sliding_window = use_sparse_attn and use_flex_sliding_window
        self.use_flex_fine_selection = use_sparse_attn and use_flex_fine_selection
        self.activation_checkpointing = activation_checkpointing
        local = check_layers("local_layers", local_layers, depth)
        if local and not use_sparse_attn:
            raise refusal("local_layers", "empty with use_sparse_attn=False", local)
        ranks = use_sparse_attn and check_ranks(layer_config).ranks
        selecting = [i for i in range(depth) if ranks and i not in local]
        sources = check_share_ranking(share_ranking, selecting, depth)
        # layers whose block indices others take
        self.shared_rankings = {*sources.values()}

        self.num_tokens = num_tokens
        self.token_emb = nn.Embedding(num_tokens, dim)
        self.layers = ModuleList()
        for index in range(depth):
            attn: Module
            if use_sparse_attn:
                # each layer copies the gate; SparseAttention itself copies compress_mlp
                gate = copied(networks.get("strategy_combine_mlp"))
                parts, settings = networks | dict(strategy_combine_mlp=gate), layer_config
                if index in local:  # compressed keys that only rank are not needed
                    settings = replace(settings, **LOCAL)
                elif sources.get(index, index) != index:
                    settings = replace(settings, **GIVEN)
                if settings is not layer_config and not settings.compresses:
                    parts["compress_mlp"] = None
                parts["use_triton_kernel"] = use_triton_fine_selection
                attn = SparseAttention.from_config(settings, **parts, **rotary)
            else:
                attn = Attention(**shape, **rotary)
            self.layers.append(Block(attn, FeedForward(dim, ff_expansion_factor)))
        self.norm = nn.RMSNorm(dim)
        self.to_logits = nn.Linear(dim, num_tokens, bias=False)

    def new_cache(
        self, max_length: int | None = None, rollback: int = 64, *, batch: int | None = None,
        page_size: int | None = None, num_pages: int | None = None,
    ) -> list[KVCache]:  # fmt: skip
        """An empty cache for each layer: a KVCache or, with `page_size`, a PagedKVCache."""
        sizes: dict[str, Any] = dict(max_length=max_length, batch=batch, rollback=rollback)
        if page_size is None and num_pages is None:
            return [KVCache(**sizes) for _ in self.layers]
        sizes |= dict(page_size=page_size, num_pages=num_pages)
        return [PagedKVCache(**sizes) for _ in self.layers]

    def forward(
        self,
        ids: Tensor,
        return_loss: bool = False,
        disable_flex: bool = False,
        disable_triton_kernel: bool = False,
        cache: list[KVCache] | None = None,
        return_cache: bool = False,
        *,
        lengths: Sequence[int] | Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        segment_ids: Tensor | None = None,
        mask: Tensor | None = None,
        ranking_queries: int | Tensor | None = None,
        ranking_weights: str = "output",
        generator: torch.Generator | None = None,
    ) -> Any:
        """Logits [b, n, num_tokens] of ids [b, n], or the next-token loss.

        Args:
            ids: token ids, of any integral dtype. With a cache these are the next tokens only, any
                number of them. An id outside of the vocabulary raises on the CPU and fails a
                device-side assert on a GPU.
            return_loss: mean cross-entropy in nats of `ids[:, 1:]` given `ids[:, :-1]`; 0 of none.
            disable_flex: leave the flex masks of the constructor unused.
            disable_triton_kernel: see SparseAttention.
            cache: of `new_cache` or an earlier call; updated in place. Excludes return_loss.
            lengths: with a cache, the real tokens of each right-padded sequence.
            cu_seqlens, segment_ids, mask: packed documents and padding, as in SparseAttention.
                Every document starts at position 0. The loss omits the first token of each
                document.
            ranking_queries: with importance="index", also return the mean ranking loss of the
                layers, as SparseAttention gives it with `ranking_weights`, each for so many queries
                that `generator` draws, or at these positions of `ids`. Excludes a cache.
        """
        check_bools(
            return_loss=return_loss, disable_flex=disable_flex,
            disable_triton_kernel=disable_triton_kernel, return_cache=return_cache,
        )  # fmt: skip
        ids = check_ids("ids", ids, self.token_emb)
        blocks: list[Any] = list(self.layers)
        check_caches(cache, [attn for attn, _ in blocks], return_loss, lengths)
        context: Any = getattr(blocks[0][0], "context", None)
        if return_loss and context is not None:
            # the next token may be another rank's
            hint = "True: shard the labels as the ids, and take the loss of the logits"
            raise refusal("return_loss", "False under context parallelism", got=hint)
        bounds = dict(cu_seqlens=cu_seqlens, segment_ids=segment_ids, mask=mask)
        alignment, cached = getattr(blocks[0][0], "alignment", 1), cache is not None or return_cache
        layout: Any
        if context is None:
            check_rows(ids, cached, lengths, None, **bounds)
            layout, lengths = layer_layout(ids, alignment, cached, lengths, **bounds)
        else:
            # chunks of the rows that documents make are as long as the windows of any layer
            config = max((attn.config for attn, _ in blocks), key=context.halo_size)
            layout = context.layout(ids, config, None, ranking_queries, cache=cache, **bounds)
        if cache is None and return_cache:
            cache = self.new_cache()
        check_ranking(ranking_queries, ranking_weights, generator, cache)
        if cache is not None and not torch.compiler.is_compiling():
            check_room(cache, len(ids), ids.shape[1], lengths)
        kwargs: dict[str, Any] = {"lengths": lengths}
        if self.use_sparse_attn:
            kwargs["disable_triton_kernel"] = disable_triton_kernel
        if layout is not None:
            ids = layout.spread(ids)
        if return_loss and layout is not None:
            labels = next_ids(ids, layout)
        elif return_loss:
            ids, labels = ids[:, :-1], ids[:, 1:]
        if layout is not None and cache is None:
            kwargs["documents"] = layout.documents
        elif cache is None and not disable_flex:
            attn, n = blocks[0][0], ids.shape[1]
            if self.use_flex_sliding_window:
                sizes = n, attn.sliding_window_size, self.causal
                kwargs["sliding_window_flex_mask"] = create_sliding_mask(*sizes, ids.device)
            if self.use_flex_fine_selection:
                sizes = n, attn.selection_block_size, self.causal
                kwargs["fine_selection_flex_mask"] = create_fine_mask(*sizes)
        queries: dict[int, Tensor] = {}
        if ranking_queries is not None:
            # drawn once: activation checkpointing runs a layer twice
            n = ids.shape[1] if layout is None else layout.target.shape[1]
            for index, (attn, _) in enumerate(blocks):
                if getattr(attn, "to_index", None) is not None:
                    i = sampled(ranking_queries, n, generator, ids.device, rows=len(ids))
                    queries[index] = i if layout is None else layout.positions(i)
            if not queries:
                raise ValueError("ranking_queries goes with layers of importance='index'")
        losses: list[Tensor] = []
        block_indices: Any = None

        x = self.token_emb(ids)
        recomputes = self.activation_checkpointing and torch.is_grad_enabled() and cache is None
        for index, block in enumerate(blocks):
            call = kwargs if cache is None else {**kwargs, "cache": cache[index]}
            ranking: dict[str, Any] = {}
            if index in queries:
                ranking = dict(ranking_queries=queries[index], ranking_weights=ranking_weights)
            if index in self.shared_rankings:
                ranking["return_block_indices"] = True
            elif getattr(block[0], "importance", None) == "given":
                call = {**call, "block_indices": block_indices}
            run = partial(checkpoint, block, use_reentrant=False) if recomputes else block
            x = run(x, **call, **ranking)
            if ranking:
                x, *others = x
                losses += others[: index in queries]
                block_indices = others[-1] if index in self.shared_rankings else block_indices
        x = x if layout is None else layout.collect(x)
        out = self.to_logits(self.norm(x))
        if return_loss:
            out = F.cross_entropy(rearrange(out, "b n t -> b t n").float(), labels, reduction="sum")
            out = out / (labels != NO_LABEL).sum().clamp(min=1)
        if losses:
            return out, torch.stack(losses).mean()
        return (out, cache) if return_cache else out

    def stream(
        self,
        prompt: Tensor,
        seq_len: int,
        temperature: float = 1.0,
        filter_thres: float = 0.9,
        top_p: float | None = None,
        use_cache_kv: bool = True,
        generator: torch.Generator | None = None,
        *,
        prompt_lengths: Sequence[int] | Tensor | None = None,
        stop_tokens: int | Sequence[int] | None = None,
        top_k: int | None = None,
    ) -> Iterator[Tensor]:
        """Continue prompts [b, n] up to `seq_len` tokens in all. Yields the new tokens one by one,
        [b] in int64. A model in training mode samples in eval mode; between tokens every module is
        in its original mode.

        Args:
            seq_len: tokens of the prompt and the new ones, at least those of the prompt.
            temperature: divides the logits; 0 (or less) takes the most likely token.
            filter_thres: sample from the fraction `1 - filter_thres` of the vocabulary with the
                largest logits.
            top_p: sample from the fewest of these tokens whose probabilities reach top_p.
            use_cache_kv: run each token once, through a KVCache, and on a GPU as a CUDA graph;
                False runs the whole text again for every token.
            generator: random generator on the prompt's device, for reproducible sampling.
            prompt_lengths: tokens of each prompt, for prompts padded on the right. Each prompt
                continues after its last token and gets as many new tokens as the longest.
            stop_tokens: ids that end a sequence, which then repeats its stop token. Sampling ends
                when all sequences have ended. (The host waits for the GPU in each step.)
            top_k: sample from at most this many of the likeliest tokens, besides `filter_thres`.
        """
        prompt = check_ids("prompt", prompt, self.token_emb)
        lengths = check_prompt(prompt, prompt_lengths)
        if not self.causal:
            raise ValueError("sampling needs causal=True, this model has causal=False")
        check_bools(use_cache_kv=use_cache_kv)
        choose = token_sampler(temperature, filter_thres, top_p, generator, top_k)
        steps = check_int("seq_len", seq_len, prompt.shape[1]) - prompt.shape[1]
        stop = check_stop(stop_tokens, getattr(self.token_emb, "num_embeddings", self.num_tokens))
        return generate(self, prompt, lengths, steps, choose, use_cache_kv, stop)

    def sample(self, prompt: Tensor, seq_len: int, *args: Any, **settings: Any) -> Tensor:
        """The tokens of `stream`, whose arguments these are: [b, seq_len - n]."""
        tokens = list(self.stream(prompt, seq_len, *args, **settings))
        return torch.stack(tokens, dim=1) if tokens else prompt[:, :0].long()


def next_ids(ids: Tensor, layout: Layout) -> Tensor:
    """The next token of each token [b t] in its document, from ids [b p] of aligned rows; NO_LABEL
    for the last token of a document."""
    p = torch.arange(ids.shape[1], device=ids.device)
    has_next = p + 1 < layout.documents.last
    following = torch.where(has_next, ids.roll(-1, dims=1), NO_LABEL)
    return layout.collect(following).masked_fill(layout.target < 0, NO_LABEL)
