"""A layer over a KV cache: writes of new tokens, and decode steps with dedicated kernels.

b  sequences    n  new tokens    h  heads    d  width of a head
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from einops import rearrange
from torch import Tensor
from torch.nn import Module

from . import ranking
from .cache import static
from .cache.kv_cache import KVCache
from .checks.scalars import shown
from .compress import gather_windows, unfold
from .ops import branches, decode
from .ops.triton import backend as triton_backend
from .ops.triton import cache as cache_writes
from .rotary import Turn, rotator


def over_cache(
    layer: Any,
    cache: KVCache,
    inp: Tensor,
    lengths: Sequence[int] | Tensor | None,
    backend: str | tuple[str, ...],
    masks: tuple[Any, Any],
) -> Tensor:
    """The layer's output [b n dim] for the next tokens. Advances the cache."""
    config = layer.config
    if torch.compiler.is_compiling():
        if cache.is_fixed:
            return over_fixed_cache(layer, cache, inp, lengths, backend, masks)
        from .compat.uncompiled import call_uncompiled

        return call_uncompiled(over_cache, layer, cache, inp, lengths, backend, masks)
    counts = cache.check(inp.shape[0], inp.shape[1], lengths)
    if torch.is_grad_enabled():
        inp = cache.zero_padding(inp, counts)  # zero gradients do not hide NaN and infinities
    x, q, kv = layer.project(inp)
    cache.bind(layer.identity, config.geometry, {"k": kv[0], "v": kv[1]})
    start = cache.positions(inp.device, counts, inp.shape[1])
    name: str = layer.choose_backend(q, *kv[:2], backend, start)
    to_all, dense = attends_densely(layer, cache), is_dense(layer, cache, counts, inp.shape[1])
    if is_step(layer, cache, q, kv, name, masks, 0 if dense else to_all):
        out = step(layer, cache, counts, x, q, kv, name if dense else None)
        out = layer.combine_heads(out)
        # of padding the kernels write zeros, to which a bias is added
        return cache.zero_padding(out, counts) if config.out_bias else out

    turn = rotator(layer.rotary_emb, start, None, name)
    tensors, raw = arranged(layer, q, kv, ranking.index_of(layer, x), turn)
    tensors |= extend(layer, cache, counts, tensors, raw)
    keeps_ranking = config.selection_stride > 1 and config.ranks
    leader = None
    if keeps_ranking and len(cache) > 0:
        leader = cache.recent("ranking", 1)[:, :, 0]
    options: dict[str, Any] = dict(q_offset=start, leader_indices=leader, backend=name)
    found, indices = by_sdpa(layer, tensors, masks, name) if dense else None, None
    if found is None:
        found, indices = layer.attend(layer.gates(x), tensors, masks, **options)
    out = layer.combine_heads(found)
    if keeps_ranking and indices is not None:
        cache.keep_recent({"ranking": rearrange(indices, "b n h s -> b h n s")}, counts, 1)
    if raw:
        cache.keep_recent(raw, counts, config.compress_block_size - 1)
    cache.advance(counts)
    note_least_length(layer, cache)
    return cache.zero_padding(out, counts)


def dense_over_cache(
    layer: Any, cache: KVCache, x: Tensor, lengths: Sequence[int] | Tensor | None
) -> Tensor:
    """`over_cache` for dense attention."""
    if torch.compiler.is_compiling():
        if cache.is_fixed:
            return dense_over_fixed_cache(layer, cache, x, lengths)
        from .compat.uncompiled import call_uncompiled

        return call_uncompiled(dense_over_cache, layer, cache, x, lengths)
    counts = cache.check(x.shape[0], x.shape[1], lengths)
    if torch.is_grad_enabled():
        x = cache.zero_padding(x, counts)
    start = cache.positions(x.device, counts, x.shape[1])
    q, k, v = layer.project(x, start)
    cache.bind(layer.identity, layer.geometry, {"k": k, "v": v})
    starts, saved = cache.starts(len(counts)), is_trained(layer, q)
    tokens = cache.append({"k": k, "v": v}, starts, counts, saved=saved)
    # new sequences need only the causal triangle; otherwise tokens also see cached tokens
    mask = None
    if isinstance(start, Tensor) or start > 0:
        i = torch.arange(q.shape[2], device=q.device)[:, None]
        i = i + (start[:, None, None, None] if isinstance(start, Tensor) else start)
        mask = torch.arange(tokens["k"].shape[2], device=q.device) <= i
    out = layer.attend(q, tokens["k"], tokens["v"], mask)
    cache.advance(counts)
    return cache.zero_padding(out, counts)


# In compiled graphs: fixed caches only. The host must know the lengths of growing or paged caches.


def over_fixed_cache(
    layer: Any,
    cache: KVCache,
    inp: Tensor,
    lengths: Sequence[int] | Tensor | None,
    backend: str | tuple[str, ...],
    masks: tuple[Any, Any],
) -> Tensor:
    """`over_cache` with shapes that do not depend on lengths."""
    config = layer.config
    l, d = config.compress_block_size, config.d
    at = static.new_tokens(cache, inp, lengths)
    x, q, kv = layer.project(static.zero_padding(inp, at))
    cache.bind(layer.identity, config.geometry, {"k": kv[0], "v": kv[1]})
    name: str = layer.choose_backend(q, *kv[:2], backend, 0 if at.first else at.starts)
    has_kernels = is_step(layer, cache, q, kv, name, masks, attends_densely(layer, cache))
    # new sequences: the new tokens are all there is, at a position that the host knows
    is_first = not has_kernels and at.first
    start = 0 if is_first else at.starts
    append = static.write_tokens if has_kernels or is_first else static.append
    turn = rotator(layer.rotary_emb, start, None, name)
    tensors, raw = arranged(layer, q, kv, ranking.index_of(layer, x), turn)
    entries = of_tokens(tensors)
    streams = append(cache, entries, at)
    if raw:
        compressed = layer.compress(static.windows(cache, raw, at, l, d))
        streams |= append(cache, compressed, at, every=d)
        static.keep_recent(cache, raw, at, l - 1)
        entries |= {name: t[:, :, : at.new // d] for name, t in compressed.items()}
    if has_kernels:
        counters = decode.workspace(len(q), kv[0].shape[1], q.device)
        given: dict[str, Any] = dict(lengths=at.starts, counts=at.counts, counters=counters)
        given |= beside(layer, cache, x, q, kv)
        out = by_kernels(layer, tensors, streams, page_table=cache.page_table, **given)
        static.advance(cache, at)
        return static.zero_padding(layer.combine_heads(rearrange(out, "b n h d -> b n (h d)")), at)
    tensors |= entries if is_first else streams
    leader = None
    keeps_ranking = config.selection_stride > 1 and config.ranks
    if keeps_ranking:
        ranks = kv[0].shape[1] if config.query_heads_share_selected_kv else q.shape[1]
        like = q.new_empty(len(q), ranks, 0, config.num_selected_blocks, dtype=torch.int32)
        cache.ring({"ranking": like}, 1)
        leader = None if is_first else static.recent(cache, "ranking", at, 1)[:, :, 0]
    options: dict[str, Any] = dict(q_offset=start, leader_indices=leader, backend=name)
    options["dense"] = config.dense_length >= (cache.max_length or 0)
    out, indices = layer.attend(layer.gates(x), tensors, masks, **options)
    if keeps_ranking:
        static.keep_recent(cache, {"ranking": rearrange(indices, "b n h s -> b h n s")}, at, 1)
    static.advance(cache, at)
    return static.zero_padding(layer.combine_heads(out), at)


def dense_over_fixed_cache(
    layer: Any, cache: KVCache, x: Tensor, lengths: Sequence[int] | Tensor | None
) -> Tensor:
    """`dense_over_cache` with shapes that do not depend on lengths."""
    at = static.new_tokens(cache, x, lengths)
    q, k, v = layer.project(static.zero_padding(x, at), 0 if at.first else at.starts)
    cache.bind(layer.identity, layer.geometry, {"k": k, "v": v})
    if at.first:
        static.write_tokens(cache, {"k": k, "v": v}, at)
        out = layer.attend(q, k, v, None)
        static.advance(cache, at)
        return static.zero_padding(out, at)
    tokens = static.append(cache, {"k": k, "v": v}, at)
    i = at.starts[:, None] + torch.arange(at.new, device=q.device)
    mask = torch.arange(tokens["k"].shape[2], device=q.device) <= i[:, None, :, None]
    out = layer.attend(q, tokens["k"], tokens["v"], mask)
    static.advance(cache, at)
    return static.zero_padding(out, at)


def arranged(
    layer: Any, q: Tensor, kv: list[Tensor], index: list[Tensor], turn: Turn
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Tensors [b h n d] of the branches by name, with queries and keys rotated, and the keys and
    values that are compressed; of both the index queries and keys."""
    config = layer.config
    k, v = layer.own(kv, "selected")
    window_k, window_v = layer.own(kv, "window")
    own_window = "window" in config.branches and window_k is not k
    keys = [k, window_k] if own_window else [k]
    at_once = index if config.rank_rotated and config.index_dim == config.dim_head else []
    rotated_q, rotated_k, *others = turn([q, *keys, *at_once])
    index = others[-2:] if at_once else ranking.turned(layer, index, turn)
    tensors = {"q": rotated_q, "k": rotated_k, "v": v}
    if own_window:
        tensors |= {"window_k": others[0], "window_v": window_v}
    raw = dict(zip("kv", layer.own(kv, "compressed"), strict=True))
    return ranking.with_index(layer, index, *layer.for_compression(tensors, {"q": q, **raw}))


def of_tokens(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The keys and values of tokens, to cache, and their index keys."""
    names = ("k", "v", "window_k", "window_v", "ck")
    return {name: tensors[name] for name in names if name in tensors}


def extend(
    layer: Any,
    cache: KVCache,
    counts: list[int],
    tensors: dict[str, Tensor],
    raw: dict[str, Tensor],
) -> dict[str, Tensor]:
    """Write new tokens and the windows that they complete to the cache. Returns its streams."""
    config = layer.config
    l, d = config.compress_block_size, config.d
    starts, saved = cache.starts(len(counts)), is_trained(layer, tensors["k"])
    tokens = cache.append(of_tokens(tensors), starts, counts, saved=saved)
    if not raw:
        return tokens

    # the next window begins d - 1 - start % d into the last l - 1 tokens and the new ones
    seen = cache.with_recent(raw, l - 1)
    skip = [d - 1 - start % d for start in starts]
    complete = [start // d for start in starts]
    new = [(a + n) // d - w for a, n, w in zip(starts, counts, complete, strict=True)]
    if len(set(skip)) <= 1:
        windows = {name: unfold(t[:, :, (skip or [0])[0] :], l, d) for name, t in seen.items()}
    else:
        windows = {name: gather_windows(t, skip, max(new), l, d) for name, t in seen.items()}
    return tokens | cache.append(layer.compress(windows), complete, new, d, saved)


def is_trained(layer: Module, inp: Tensor) -> bool:
    """Whether autograd may save the tensors that the layer reads."""
    if not torch.is_grad_enabled():
        return False
    return inp.requires_grad or any(p.requires_grad for p in layer.parameters())


def is_step(
    layer: Any,
    cache: KVCache,
    q: Tensor,
    kv: list[Tensor],
    backend: str,
    given_masks: tuple[Any, Any],
    to_all: int = 0,
) -> bool:
    """Whether the decode kernels support this call: few tokens, no gradients, no flex masks, none
    of them at a position below `to_all`, where tokens attend to all keys."""
    config = layer.config
    n = q.shape[2]
    if cache.batch is None or n > cache.rollback:
        return False
    if given_masks != (None, None) or backend != "triton":
        return False
    if layer.to_index is not None and config.index_dim != config.dim_head:
        return False
    if is_trained(layer, q):
        return False
    q, k, v = (t.transpose(1, 2) for t in (q, kv[0], kv[1]))
    return not triton_backend.why_not(
        "decode_attention", q, k, v, config=layer.settings(), dense_length=to_all
    )


def attends_densely(layer: Any, cache: KVCache) -> int:
    """The length below which some new token attends to all keys; 0 if there is none."""
    if layer._dense:
        return sys.maxsize
    length: int = layer.config.dense_length
    if torch.compiler.is_compiling():  # there the device alone knows the lengths
        return 0 if length and cache.least_length >= length else length
    return length if any(held < length for held in cache.lengths) else 0


def is_dense(layer: Any, cache: KVCache, counts: list[int], n: int) -> bool:
    """Whether n tokens in each row attend to all keys, which lie in the storage as SDPA reads them;
    and no ranking is kept."""
    config = layer.config
    if config.branches != ("selected",) or cache.page_size is not None or not cache.is_uniform:
        return False
    if any(count != n for count in counts) or (config.selection_stride > 1 and config.ranks):
        return False
    whole: bool = layer._dense or len(cache) + n <= config.dense_length > 0
    return whole


def by_sdpa(
    layer: Any,
    tensors: dict[str, Tensor],
    masks: tuple[Any, Any],
    backend: str,
) -> Tensor | None:
    """Dense attention [b n (h d)] of `is_dense` tokens, without the checks of `layer.attend`; None
    where SDPA has no form of it."""
    config = layer.config
    if masks != (None, None) or layer.sinks is not None or config.soft_cap is not None:
        return None
    if config.use_diff_topk:  # whose unread tensors have gradients
        return None
    q, k, v = (tensors[name] for name in "qkv")
    out = branches.attend_sdpa(q, k, v, True, config.scale, backend)
    return None if out is None else rearrange(out, "b h n d -> b n (h d)")


def note_least_length(layer: Any, cache: KVCache) -> None:
    """Note on the host whether each sequence has reached the layer's `dense_length`."""
    length = layer.config.dense_length
    cache.least_length = length if all(held >= length for held in cache.lengths) else 0


def step(
    layer: Any,
    cache: KVCache,
    counts: list[int],
    x: Tensor,
    q: Tensor,
    kv: list[Tensor],
    dense: str | tuple[str, ...] | None = None,
) -> Tensor:
    """Write `counts` new tokens per sequence, attend, [b n (h d)], and advance the cache. Kernels
    read lengths on the device, so a CUDA graph of a step can replay at any lengths. The host must
    count lengths too, since it decides whether a window is complete. `dense`: the backend of dense
    attention, in place of the decode kernels. It reads as many keys as the host counts, so that no
    graph may have it."""
    config = layer.config
    l, d = config.compress_block_size, config.d
    b, _, n, _ = q.shape
    held = cache.lengths_on(q.device)
    ragged = any(count != n for count in counts)
    new = torch.tensor(counts, dtype=torch.int32).to(q.device) if ragged else None
    index = ranking.index_of(layer, x)
    # before rotation: rotated tensors have the same shapes
    tensors, raw = arranged(layer, q, kv, index, list)
    stores, rings = cache.room(of_tokens(tensors), counts), {}
    if raw:
        rings, empty = cache.ring(raw, l - 1), {f"c{name}": t[:, :, :0] for name, t in raw.items()}
        stores |= cache.room(empty, counts, every=d)
    at = SimpleNamespace(
        layer=layer, q=q, kv=kv, index=index, stores=stores, rings=rings, lengths=held, counts=new,
        page_table=cache.page_table, page_size=cache.page_size,
        counters=cache.workspace(q.device, kv[0].shape[1], decode.COUNTERS),
        beside=beside(layer, cache, x, q, kv), completes=False,
    )  # fmt: skip
    run = written_and_attended if dense is None else written
    at.completes = bool(raw) and completes_window(cache.starts(b), counts, d)
    out = run(at)
    if dense is None:
        out = out.flatten(2)
    else:
        seen = {name: stores[name][:, :, : len(cache) + n] for name in "kv"}
        where: dict[str, Any] = dict(q_offset=len(cache), backend=dense, dense=True)
        out, _ = layer.attend(None, {"q": out} | seen, (None, None), **where)
    held += n if new is None else new
    cache.count(counts)
    cache.counts_itself = dense is None
    note_least_length(layer, cache)
    return out


def written(at: SimpleNamespace) -> Tensor:
    """The rotated queries [b h n d] of new tokens, whose keys and values go to the cache."""
    q: Tensor = write(at)["q"]
    return q


def written_and_attended(at: SimpleNamespace) -> Tensor:
    """The output [b n h d] of new tokens, which are written to the cache before."""
    return by_kernels(
        at.layer, write(at), at.stores, lengths=at.lengths, counts=at.counts,
        page_table=at.page_table, counters=at.counters, **at.beside,
    )  # fmt: skip


def write(at: SimpleNamespace) -> dict[str, Tensor]:
    """Rotate new tokens and write them to the storage of the cache. Returns their tensors
    [b h n d]."""
    layer, (held, n) = at.layer, (at.lengths, at.q.shape[2])
    config = layer.config
    l, d = config.compress_block_size, config.d
    turn = rotator(layer.rotary_emb, held, None, "triton")
    tensors, raw = arranged(layer, at.q, at.kv, at.index, turn)
    pages = dict(counts=at.counts, page_table=at.page_table, page_size=at.page_size)
    for names in ("k", "v"), ("window_k", "window_v"), ("ck", "cv"):
        if names[0] in tensors:
            cache_writes.append(pick(tensors, names), pick(at.stores, names), held, n, **pages)
    if raw:
        cache_writes.append(pick(raw), pick(at.rings), held, n, counts=at.counts, tail=True)
    if at.completes:
        windows = dict(zip("kv", cache_writes.recent(pick(at.rings), held, n, l, d), strict=True))
        summaries, names = layer.compress({name: windows[name] for name in raw}), ("ck", "cv")
        into = pick(at.stores, names)
        cache_writes.append(pick(summaries, names), into, held, n, every=d, **pages)
    return tensors


def beside(layer: Any, cache: KVCache, x: Tensor, q: Tensor, kv: list[Tensor]) -> dict[str, Any]:
    """What the decode kernels read and write beside tokens: gates, sinks, memory, and the rankings
    that tokens share."""
    config = layer.config
    earlier = None
    if config.selection_stride > 1 and config.ranks:
        ranks = kv[0].shape[1] if config.query_heads_share_selected_kv else q.shape[1]
        like = q.new_empty(len(q), ranks, 0, config.num_selected_blocks, dtype=torch.int32)
        earlier = cache.ring({"ranking": like}, 1)["ranking"]
    given = dict(branch_gates=layer.gates(x), sinks=layer.sinks, ranking=earlier)
    return given | layer.memory(q.dtype)


def by_kernels(
    layer: Any, tensors: dict[str, Tensor], stores: dict[str, Tensor], **given: Any
) -> Tensor:
    """Attention [b n h d] of new tokens, of which the cache has `stores` [b h n d]. `given` are the
    other tensors of the operator."""
    q, kv_heads = tensors["q"], stores["k"].shape[1]
    stores = dict(stores)
    if layer.ranks_by_tokens():
        stores["ck"] = stores["k"]
    if layer.to_index is not None and "ck" in stores:  # the kernels have a query for each head
        stores["ck"] = stores["ck"].expand(-1, kv_heads, -1, -1)
        tensors = tensors | dict(cq=tensors["cq"].repeat_interleave(q.shape[1] // kv_heads, dim=1))
    # the layer and its cache made these tensors: there is nothing to check
    rows = {name: rearrange(t, "b h n d -> b n h d") for name, t in (tensors | stores).items()}
    out: Tensor = decode.run_decode_kernels(layer.settings(), **rows, **given)
    return out


def pick(tensors: dict[str, Tensor], names: tuple[str, str] = ("k", "v")) -> tuple[Tensor, Tensor]:
    """Keys and values; keys twice if there are no values, since kernels write pairs."""
    k, v = names
    return tensors[k], tensors[v if v in tensors else k]


def completes_window(starts: list[int], counts: list[int], d: int) -> bool:
    """Whether the new tokens complete a window of some sequence."""
    return any((a + n) // d > a // d for a, n in zip(starts, counts, strict=True))


def check_cache(
    cache: KVCache | None,
    return_cache: bool,
    lengths: Sequence[int] | Tensor | None,
    causal: bool,
    alignment: int = 1,
) -> KVCache | None:
    """Check the cache of a layer's call; `return_cache` without a cache makes a new one. Pages must
    hold a multiple of `alignment` tokens, that is whole blocks and windows."""
    if cache is not None and not isinstance(cache, KVCache):
        raise ValueError(f"cache must be a KVCache, got {type(cache).__name__}")
    if (return_cache or cache is not None) and not causal:
        raise ValueError("cache and return_cache need causal=True, this layer has causal=False")
    if cache is None and return_cache:
        cache = KVCache()
    if cache is not None and (cache.page_size or 0) % alignment:
        raise ValueError(
            "page_size must be a multiple of the layer's selection_block_size and "
            f"compress_block_sliding_stride, of {alignment}, got {cache.page_size}"
        )
    if lengths is not None and cache is None:
        raise ValueError("lengths goes with a cache or return_cache=True")
    return cache


def check_caches(
    caches: Any, layers: list[Any], return_loss: bool = False, lengths: Any = None
) -> None:
    """Check before any write that there is one cache per layer, each bound to its layer, or None.
    A loss excludes caches."""
    for name, value in (("cache", caches), ("lengths", lengths)):
        if return_loss and value is not None:
            raise ValueError(f"{name} must be None with return_loss=True, got {shown(value)}")
    if caches is None:
        return
    if not isinstance(caches, (list, tuple)):
        raise ValueError(
            f"cache must be a list of one KVCache for each of {len(layers)} layers, as new_cache "
            f"makes it, got {shown(caches)}"
        )
    if len(caches) != len(layers):
        raise ValueError(
            f"cache must hold one KVCache for each of {len(layers)} layers, got {len(caches)}"
        )
    for index, cache in enumerate(caches):
        if not isinstance(cache, KVCache):
            raise ValueError(f"cache[{index}] must be a KVCache, got {shown(cache)}")
    if len(set(map(id, caches))) != len(caches):
        raise ValueError("cache must hold a KVCache for each layer, got one of them twice")
    for cache, layer in zip(caches, layers, strict=True):
        if hasattr(layer, "identity"):
            cache.check_layer(layer.identity, layer.geometry)
