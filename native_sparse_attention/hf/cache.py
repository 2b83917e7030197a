"""Caches of transformers: of `use_sparse_attention` models, which keep the compressed keys of
windows beside keys and values, and of `SparseAttention` layers, which keep a `KVCache`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig
from transformers.cache_utils import (
    Cache,
    CacheLayerMixin,
    DynamicCache,
    DynamicLayer,
    StaticCache,
    StaticLayer,
)

from ..cache.kv_cache import KVCache
from ..checks.scalars import check_int, shown
from ..compress import unfold, windows_of
from .settings import settings_of

# tokens that storage has room for beyond those that are there, at least; else an eighth of them
LEAST_ROOM = 64


def keep_means(key: Tensor, l: int, d: int, means: Tensor) -> None:
    """Keep the means [B K W D] of windows of keys [B K S D] with them: attention functions of
    transformers get the keys that a cache returns, and not the cache."""
    setattr(key, f"nsa_means_{l}_{d}", means)


def kept_means(key: Tensor, l: int, d: int) -> Tensor | None:
    """The means [B K W D] that a cache keeps of its keys, if it has such windows. Those of windows
    that are not complete have any value."""
    means: Tensor | None = getattr(key, f"nsa_means_{l}_{d}", None)
    return means


def windows_by(config: Any) -> tuple[int, int]:
    """Tokens of a window of the compressed keys, and from window to window, by `model.config`."""
    if not isinstance(config, PreTrainedConfig):
        raise ValueError(f"config must be model.config, got {shown(config)}")
    settings = settings_of(config.get_text_config(decoder=True))
    return settings["compress_block_size"], settings["compress_block_sliding_stride"]


class SparseLayer(DynamicLayer):
    """Keys and values [B K S D] of a layer in storage with room for more, and the mean keys
    [B K W D] of its windows: a step writes its own tokens, where a `DynamicLayer` copies all.

    What an update returned stays as it was until tokens are taken back (`crop`) and others written.
    """

    def __init__(self, l: int = 1, d: int = 1, **unknown: Any) -> None:
        super().__init__()
        self.keys: Tensor
        self.values: Tensor
        self.windows = (l, d)
        self.stores: dict[str, Tensor] = {}
        self.means: Tensor | None = None

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        # of keys that another call has moved or cropped they are computed anew
        self.means = kept_means(self.keys, *self.windows) if self.is_initialized else None
        # autograd saves what a call returned
        copies = torch.is_grad_enabled() or torch.compiler.is_compiling()
        if copies or not self.is_initialized:
            super().update(key_states, value_states, *args, **kwargs)
        else:
            self.keys = self.extended("keys", self.keys, key_states)
            self.values = self.extended("values", self.values, value_states)
        if self.windows != (1, 1) and not torch.compiler.is_compiling():
            self.compress(copies)
        return self.keys, self.values

    def compress(self, copies: bool) -> None:
        """Add the windows that the newest tokens complete."""
        (l, d), S = self.windows, self.keys.shape[2]
        done = 0 if self.means is None else self.means.shape[2]
        if self.means is None or done * d < l:  # windows that begin before the first token
            self.means = windows_of(self.keys, l, d, True).mean(dim=-2)
        elif S // d > done:
            new = unfold(self.keys[:, :, (done + 1) * d - l :], l, d).mean(dim=-2)
            parts = self.means, new
            self.means = torch.cat(parts, dim=2) if copies else self.extended("means", *parts, d)
        keep_means(self.keys, l, d, self.means)

    def extended(self, name: str, held: Tensor, new: Tensor, every: int = 1) -> Tensor:
        """The held entries [B K n D] of `every` tokens each, and the new ones after them."""
        if held.ndim != 4 or not fits(held, new):
            return torch.cat((held, new), dim=-2)
        S, most = held.shape[2], held.shape[2] + new.shape[2]
        store = self.stores.get(name)
        # crops leave the begin of the storage, other calls another tensor
        begins = store is not None and store.data_ptr() == held.data_ptr() and fits(store, new)
        if store is None or not begins or store.shape[2] < most:
            room = most + max(LEAST_ROOM // every, most // 8)
            store = self.stores[name] = held.new_empty(*held.shape[:2], room, held.shape[3])
            store[:, :, :S] = held
        store[:, :, S:most] = new
        return store[:, :, :most]

    def reset(self) -> None:
        self.stores.clear()
        super().reset()

    def offload(self) -> None:
        self.stores.clear()
        super().offload()


def fits(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors differ in their length alone."""
    kinds = ((t.dtype, t.device, t.shape[:2], t.shape[3:], t.is_inference()) for t in (one, other))
    return len(set(kinds)) == 1


class SparseCache(DynamicCache):
    """A `DynamicCache` for a model under sparse attention.

    `model.generate(..., past_key_values=SparseCache(model.config))`; newer releases call it
    `cache`. A `DynamicCache` copies all keys and values at each step, and this one those of the
    step: it has room for more, at most an eighth of its tokens or 64. Where windows hold several
    tokens (`compress_block_size` above 1) it also keeps their compressed keys, which saves the
    reading of all keys.

    Args:
        config: `model.config`, after `use_sparse_attention(model)`.
    """

    def __init__(self, config: Any) -> None:
        sizes = windows_by(config)
        super().__init__(config=config)
        self.layers: list[Any] = [
            SparseLayer(*sizes) if type(layer) is DynamicLayer else layer for layer in self.layers
        ]


class StaticSparseLayer(StaticLayer):
    """Also the mean keys [B K W + 1 D] of a layer's windows. The last slot takes the means of
    windows that are not complete, which nothing reads."""

    def __init__(self, l: int, d: int, max_cache_len: int, **unknown: Any) -> None:
        super().__init__(max_cache_len=max_cache_len)
        self.windows = (l, d)

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        super().lazy_initialization(key_states, value_states)
        B, K, N, D = self.keys.shape
        self.means = self.keys.new_zeros(B, K, N // self.windows[1] + 1, D)
        if not torch.compiler.is_compiling():
            torch._dynamo.mark_static_address(self.means)
        keep_means(self.keys, *self.windows, self.means)

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        keys, values = super().update(key_states, value_states, *args, **kwargs)
        (l, d), S, N, T = self.windows, self.cumulative_length, keys.shape[2], key_states.shape[2]
        # windows that the new tokens may complete
        window = (S - T) // d + torch.arange(T // d + 1, device=keys.device)
        end = (window + 1) * d
        token = end[:, None] - l + torch.arange(l, device=keys.device)
        tokens = keys.index_select(2, token.clamp(0, N - 1).flatten()).unflatten(2, token.shape)
        means = tokens.masked_fill(token[..., None] < 0, 0).mean(dim=3)
        self.means.index_copy_(2, torch.where(end <= S, window, N // d), means)
        return keys, values

    def reorder_cache(self, beam_idx: Tensor) -> None:
        super().reorder_cache(beam_idx)
        if self.is_initialized:
            self.means = self.means.index_select(0, beam_idx.to(self.means.device))
            keep_means(self.keys, *self.windows, self.means)

    def prefetch(self) -> None:
        super().prefetch()
        if self.is_initialized:
            keep_means(self.keys, *self.windows, self.means)


class StaticSparseCache(StaticCache):
    """A `StaticCache` for a model under sparse attention: storage for `max_cache_len` tokens, and
    one compiled graph for all steps.

    Where windows hold several tokens (`compress_block_size` above 1) it also keeps their compressed
    keys, which saves the reading of all keys at each step. `copy.deepcopy` copies them; keys that
    are written into a layer by hand do not change them.

    Args:
        config: `model.config`, after `use_sparse_attention(model)`.
        max_cache_len: the most tokens of a sequence.
        others: `offloading` and `offload_only_non_sliding` of `StaticCache`.
    """

    def __init__(self, config: Any, max_cache_len: int, **others: Any) -> None:
        sizes = windows_by(config)
        max_cache_len = check_int("max_cache_len", max_cache_len, 1)
        super().__init__(config=config, max_cache_len=max_cache_len, **others)
        if sizes != (1, 1):
            self.layers: list[Any] = [
                StaticSparseLayer(*sizes, max_cache_len) if type(layer) is StaticLayer else layer
                for layer in self.layers
            ]


class KVLayer(CacheLayerMixin):
    """The tokens of one `SparseAttention` layer in a `KVCache`, which holds no padding.
    transformers counts slots, padding included.

    Attributes:
        cache: the tokens themselves.
        slots: tokens of each sequence with padding.
        real: [B, slots], whether a slot holds a token; None if all do.
        packed: whether the only forward so far had packed documents, which are not kept.
    """

    is_sliding = False
    is_croppable = True

    def __init__(self, **unknown: Any) -> None:
        super().__init__()
        self.cache = KVCache()
        self.slots: Any = 0
        self.real: Tensor | None = None
        self.packed = False

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        raise ValueError(
            "past_key_values holds the tokens of a SparseAttention, which another model cannot use"
        )

    def count(self, tokens: int, real: Tensor | None) -> None:
        """Count the slots of a forward. `real` [B, slots] is of all slots so far."""
        self.is_initialized = True
        self.slots += tokens
        self.real = real

    def check_past(self, real: Tensor | None) -> None:
        """Check that a mask [B, past slots] hides the padding that earlier masks hid, no more.

        Raises:
            ValueError: it does not, or the cache has seen packed documents.
        """
        if self.packed:
            raise ValueError(
                "past_key_values has seen packed documents, of which it keeps nothing: call the "
                "model with use_cache=False, or give each document a row"
            )
        if torch.compiler.is_compiling() or not self.slots:  # there the host does not know
            return
        held = self.cache.lengths
        expected = [int(self.slots)] * len(held) if real is None else real.sum(1).tolist()
        if held != expected:
            raise ValueError(
                f"attention_mask must show the {held} tokens that past_key_values holds of each "
                f"sequence, got {expected}: give the mask [B, S] of all tokens so far"
            )

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.slots + query_length, 0

    def get_seq_length(self) -> int:
        slots: int = self.slots
        return slots

    def get_max_length(self) -> int:
        return -1

    def get_max_cache_shape(self) -> int:  # in older releases
        return self.get_max_length()

    def reset(self) -> None:
        self.cache, self.slots, self.real, self.packed = KVCache(), 0, None, False
        self.is_initialized = False

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last slots, as many as the negative number says."""
        n = -tokens_to_remove if tokens_to_remove <= 0 else self.slots - tokens_to_remove
        if n <= 0 or not self.slots:
            return
        removed = [n] * len(self.cache.lengths)
        if self.real is not None:
            removed = self.real[:, self.slots - n :].sum(1).tolist()
            self.real = self.real[:, : self.slots - n]
        kept = [held - m for held, m in zip(self.cache.lengths, removed, strict=True)]
        self.cache.truncate(kept)
        self.slots -= n

    def reorder_cache(self, beam_idx: Tensor) -> None:
        if self.slots:
            self.cache.reorder(beam_idx)
            if self.real is not None:
                self.real = self.real[beam_idx.to(self.real.device)]

    def batch_repeat_interleave(self, repeats: int) -> None:
        rows = torch.arange(len(self.cache.lengths))
        self.reorder_cache(rows.repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        rows = torch.arange(len(self.cache.lengths), device=indices.device)
        self.reorder_cache(rows[indices])


class StaticKVLayer(KVLayer):
    """A `KVLayer` of fixed size, whose steps transformers compiles: the device counts the slots.

    Args:
        max_cache_len: the most tokens of a sequence, and the width of masks.
    """

    is_compileable = True
    is_croppable = False

    def __init__(self, max_cache_len: int, **unknown: Any) -> None:
        super().__init__()
        self.max_cache_len = max_cache_len
        self.cache = KVCache(max_cache_len)

    def begin(self, device: torch.device) -> None:
        """Count slots on a device from the first call on: compiled steps count in place."""
        if isinstance(self.slots, int):
            with torch.inference_mode(False):  # else no other mode could count
                self.slots = torch.zeros((), dtype=torch.long, device=device)

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.begin(key_states.device)
        self.is_initialized = True

    def count(self, tokens: int, real: Tensor | None) -> None:
        self.is_initialized = True
        self.slots.add_(tokens)
        if not torch.compiler.is_compiling():
            self.mark()

    def mark(self) -> None:
        """Tell the compiler that the tensors stay where they are, so that CUDA graphs write them in
        place."""
        for t in (self.slots, *self.cache.tensors().values()):
            torch._dynamo.mark_static_address(t)

    def check_new(self, new: int, length: Any, tokens: Tensor | None) -> None:
        """Check that `new` slots are left, and a mask of `length` keys, [B, slots] with padding.

        Raises:
            ValueError: fewer slots, keys other than those up to the last token, or padding that
                earlier masks did not hide.
        """
        past = int(self.slots)
        if past + new > self.max_cache_len:
            raise ValueError(
                f"past_key_values is full: it holds {past} of {self.max_cache_len} tokens, got "
                f"{new} more"
            )
        if length is not None and int(length) != past + new:
            raise ValueError(
                f"attention_mask must show the {past + new} keys up to the last new token, got "
                f"{int(length)}"
            )
        self.check_past(None if tokens is None else tokens[:, :past])

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.max_cache_len, 0

    def get_max_length(self) -> int:
        return self.max_cache_len

    def reset(self) -> None:
        self.cache.reset()
        self.packed = False
        if self.is_initialized:
            self.slots.zero_()

    def crop(self, tokens_to_remove: int) -> None:
        raise ValueError(
            "past_key_values must be a DynamicCache to be cropped, got a StaticCache: leave out "
            "cache_implementation"
        )

    def reorder_cache(self, beam_idx: Tensor) -> None:
        if self.is_initialized:
            self.cache.reorder(beam_idx)
            self.mark()


def layer_of(cache: Any, index: int) -> KVLayer:
    """The layer of a cache for an attention module. An empty layer of a `DynamicCache` becomes a
    `KVLayer`, one of a `StaticCache` a `StaticKVLayer`.

    Raises:
        ValueError: another kind of cache, offloading, or a layer that holds tokens of another
            model.
    """
    is_offloaded = getattr(cache, "offloading", False)
    layer: Any = None
    if isinstance(cache, Cache) and not is_offloaded:
        while cache.layer_class_to_replicate in (None, DynamicLayer) and len(cache.layers) <= index:
            cache.layers.append(DynamicLayer())
        layer = cache.layers[index] if index < len(cache.layers) else None
    if type(layer) in (DynamicLayer, StaticLayer):
        tracing = torch.compiler.is_compiling()  # there the host does not know
        if not tracing and (held := int(layer.get_seq_length())) > 0:
            raise ValueError(
                f"past_key_values must be empty or of this model, got the {held} tokens of another"
            )
        is_static = type(layer) is StaticLayer
        layer = cache.layers[index] = StaticKVLayer(layer.max_cache_len) if is_static else KVLayer()
    if isinstance(layer, KVLayer):
        return layer
    name = f"an offloaded {type(cache).__name__}" if is_offloaded else type(cache).__name__
    raise ValueError(
        "past_key_values must be a DynamicCache or a StaticCache on the device with "
        f"SparseAttention, whose layers keep a KVCache, got {name} of "
        f"{sorted({type(layer).__name__ for layer in getattr(cache, 'layers', [])})}: leave out "
        'cache_implementation, or give "static"'
    )
