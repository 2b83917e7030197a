"""Caches of transformers: of `use_sparse_attention` models, which keep the compressed keys of
windows and rankings with keys and values, and of `SparseAttention` layers, which keep a `KVCache`.
"""

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

from ..attention import SparseAttention
from ..cache.kv_cache import KVCache, allocate_zeros, capacity_of
from ..checks import check_int, check_type, refusal
from ..compress import unfold, windows_of
from .configuration import drop_in_config
from .mask import NSAMask

# newest tokens whose block indices a `SparseLayer` keeps; a crop may remove all of them but one
RANKED_TOKENS = 512


def keep_means(key: Tensor, l: int, d: int, means: Tensor) -> None:
    """Keep the means [B K W D] of windows of keys [B K S D] with them: attention functions of
    transformers get the keys that a cache returns, and not the cache."""
    setattr(key, f"nsa_means_{l}_{d}", means)


def kept_means(key: Tensor, l: int, d: int) -> Tensor | None:
    """The means [B K W D] that a cache keeps of its keys, of incomplete windows with any value."""
    means: Tensor | None = getattr(key, f"nsa_means_{l}_{d}", None)
    return means


def rankings_of(
    rankings: dict[Any, Any], index: Any, key: Tensor, heads: int, n: int, start: Any, end: Any
) -> tuple[Tensor, bool]:
    """Of those that a `SparseLayer` keeps with its keys those of a layer of the model, for a call
    of the tokens from start to end, and whether they are new, as after tokens that were not ranked:
    block indices [B R_ RANKED_TOKENS n], each at the position of its token modulo RANKED_TOKENS, or
    -1."""
    (found, last), shape = rankings.get(index, (None, 0)), (len(key), heads, RANKED_TOKENS, n)
    is_new = found is None or found.shape != shape or last < start
    if is_new:
        found = allocate_zeros(key, *shape, dtype=torch.int32).fill_(-1)
    rankings[index] = found, end
    return found, is_new


def window_sizes(config: Any) -> tuple[int, int]:
    """Tokens of a window of the compressed keys, and from window to window, by `model.config`."""
    check_type("config", config, PreTrainedConfig, "model.config")
    settings = drop_in_config(config.get_text_config(decoder=True))
    return settings.compress_block_size, settings.d


class SparseLayer(DynamicLayer):
    """Keys and values [B K S D] of a layer in storage with spare capacity, and the mean keys
    [B K W D] of its windows. A step writes its own tokens alone."""

    def __init__(self, l: int = 1, d: int = 1, **unknown: Any) -> None:
        super().__init__()
        self.keys: Any
        self.values: Any
        self.windows = (l, d)
        self.stores: dict[str, Tensor] = {}
        self.rankings: dict[Any, Any] = {}
        self.most_tokens = 0  # that it has held with these rankings

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        l, d = self.windows
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        # of keys that another call has moved or cropped they are computed anew
        means: Any = kept_means(self.keys, l, d)
        self.keys = self.extend("keys", self.keys, key_states)
        self.values = self.extend("values", self.values, value_states)
        if torch.compiler.is_compiling():
            return self.keys, self.values
        total = self.keys.shape[2]
        if self.most_tokens - (total - key_states.shape[2]) >= RANKED_TOKENS:
            self.rankings.clear()  # crops have removed all of their tokens
            self.most_tokens = 0
        self.most_tokens = max(self.most_tokens, total)
        self.keys.nsa_rankings = self.rankings
        if l == d == 1:
            return self.keys, self.values
        count = 0 if means is None else means.shape[2]
        if count * d < l:  # windows that begin before the first token
            means = windows_of(self.keys, l, d, True).mean(dim=-2)
        elif self.keys.shape[2] // d > count:  # the newest tokens complete some
            new = unfold(self.keys[:, :, (count + 1) * d - l :], l, d).mean(dim=-2)
            means = self.extend("means", means, new)
        keep_means(self.keys, l, d, means)
        return self.keys, self.values

    def extend(self, name: str, entries: Tensor, new: Tensor) -> Tensor:
        """The entries [B K n D], and the new ones after them: in storage, if nothing saves them."""
        if torch.is_grad_enabled() or torch.compiler.is_compiling() or entries.ndim != 4:
            return torch.cat((entries, new), dim=-2)
        S, total = entries.shape[2], entries.shape[2] + new.shape[2]
        store = self.stores.get(name)
        # crops leave the begin of the storage, other calls another tensor
        is_moved = store is None or store.data_ptr() != entries.data_ptr()
        if store is None or is_moved or store.shape[2] < total:
            with torch.inference_mode(False):  # else no other mode could write
                store = new.new_empty(*new.shape[:2], capacity_of(total), new.shape[3])
            store[:, :, :S] = entries
            self.stores[name] = store
        store[:, :, S:total] = new
        return store[:, :, :total]

    def batch_select_indices(self, indices: Tensor) -> None:
        if self.is_initialized:
            rows = indices.to(self.keys.device)
            super().batch_select_indices(rows)
            with torch.inference_mode(False):  # else no other mode could write
                self.rankings = {i: (t[rows], end) for i, (t, end) in self.rankings.items()}

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.batch_select_indices(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.is_initialized:
            self.batch_select_indices(torch.arange(len(self.keys)).repeat_interleave(repeats))

    def reset(self) -> None:
        self.stores.clear()
        self.rankings.clear()
        # dropped, as later releases do: transformers 5.17 keeps them and writes zeros
        self.keys = self.values = None
        self.is_initialized = False
        super().reset()


class SparseCache(DynamicCache):
    """A `DynamicCache` for a model under sparse attention, to be given to `generate`.

    Its storage grows as that of a `KVCache`, so that a step copies its own keys and values alone.
    It keeps the compressed keys of windows of several tokens (`compress_block_size` above 1), and
    where tokens share rankings (`selection_stride` above 1, two stages) those of the newest 512
    tokens: steps match a forward without a cache, also after a crop of fewer tokens.

    Args:
        config: `model.config`, after `use_sparse_attention(model)`.
    """

    def __init__(self, config: Any) -> None:
        sizes = window_sizes(config)
        super().__init__(config=config)
        for index, layer in enumerate(self.layers):
            if type(layer) is DynamicLayer:
                self.layers[index] = SparseLayer(*sizes)


class StaticSparseLayer(StaticLayer):
    """Also the mean keys [B K W + 1 D] of a layer's windows. The last slot takes the means of
    windows that are not complete, which nothing reads."""

    def __init__(self, l: int, d: int, max_cache_len: int) -> None:
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


class StaticSparseCache(StaticCache):
    """A `StaticCache` for a model under sparse attention. It keeps the compressed keys of windows
    as a `SparseCache` does, in compiled steps too.

    Args:
        config: `model.config`, after `use_sparse_attention(model)`.
        max_cache_len: the most tokens of a sequence.
    """

    def __init__(self, config: Any, max_cache_len: int) -> None:
        sizes = window_sizes(config)
        max_cache_len = check_int("max_cache_len", max_cache_len, 1)
        super().__init__(config=config, max_cache_len=max_cache_len)
        for index, layer in enumerate(self.layers):
            if type(layer) is StaticLayer and sizes != (1, 1):
                self.layers[index] = StaticSparseLayer(*sizes, max_cache_len)


class KVLayer(CacheLayerMixin):
    """The tokens of one `SparseAttention` layer in a `KVCache`, which holds no padding.
    transformers counts slots, padding included. With `max_cache_len` it compiles the steps, and
    the device counts the slots."""

    is_sliding = False

    def __init__(self, max_cache_len: int | None = None, **unknown: Any) -> None:
        super().__init__()
        self.max_cache_len = max_cache_len
        self.is_compileable = max_cache_len is not None
        self.is_croppable = not self.is_compileable
        self.cache = KVCache(max_cache_len)
        self.slots: Any = 0

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Count slots on a device from the first call on: compiled steps count in place."""
        if self.is_compileable and isinstance(self.slots, int):
            self.slots = allocate_zeros(key_states, dtype=torch.long)
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        raise ValueError("past_key_values must be of this model, got one of SparseAttention layers")

    def attend(self, layer: SparseAttention, x: Tensor, mask: NSAMask, **options: Any) -> Any:
        """The output of the layer for new tokens x [B, T, dim], with options of its forward."""
        if not self.is_initialized:
            self.lazy_initialization(x, x)
        (B, T, _), is_compiling = x.shape, torch.compiler.is_compiling()
        if not is_compiling and any(lengths := self.cache.lengths):
            shown = mask.share(NSAMask.earlier_tokens, B, T)
            if lengths != shown:
                expected = f"show the {lengths} tokens that past_key_values holds of each sequence"
                hint = "give the mask [B, S] of all tokens so far"
                raise ValueError(f"attention_mask must {expected}, got {shown}: {hint}")
        if mask.tokens is not None:
            new, are_all = mask.share(NSAMask.new_tokens, T)
            if not are_all:
                options |= dict(lengths=new[:, 0].int()) if T == 1 else dict(mask=new)
        out = layer(x, cache=self.cache, **options)
        self.slots += T  # in place on a device
        if self.is_compileable and not is_compiling:
            self.mark()
        return out

    def mark(self) -> None:
        """Tell the compiler that the tensors stay where they are, for writes in CUDA graphs."""
        for t in (self.slots, *self.cache.tensors().values()):
            torch._dynamo.mark_static_address(t)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.slots + query_length if self.max_cache_len is None else self.max_cache_len, 0

    def get_seq_length(self) -> int:
        return self.slots  # type: ignore[no-any-return]

    def get_max_length(self) -> int:
        return -1 if self.max_cache_len is None else self.max_cache_len

    def reset(self) -> None:
        if self.is_compileable and self.is_initialized:
            self.cache.reset()
            self.slots.zero_()
        elif self.is_initialized:
            self.__init__()  # type: ignore[misc]

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last slots, as many as the negative number says, all of tokens."""
        if self.is_compileable:
            raise ValueError("cache must be a DynamicCache to be cropped, got a StaticCache")
        n = -tokens_to_remove if tokens_to_remove <= 0 else self.slots - tokens_to_remove
        if n <= 0 or not self.slots:
            return
        self.slots -= n
        self.cache.truncate([max(0, length - n) for length in self.cache.lengths])

    def reorder_cache(self, beam_idx: Tensor) -> None:
        if any(self.cache.lengths):
            self.cache.reorder(beam_idx)
            if self.is_compileable:
                self.mark()

    def batch_repeat_interleave(self, repeats: int) -> None:
        self.reorder_cache(torch.arange(len(self.cache.lengths)).repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        self.reorder_cache(torch.arange(len(self.cache.lengths), device=indices.device)[indices])


def layer_of(cache: Any, index: int) -> KVLayer:
    """The layer of a cache for an attention module. An empty one becomes a `KVLayer`."""
    is_offloaded = getattr(cache, "offloading", False)
    layer: Any = None
    if isinstance(cache, Cache) and not is_offloaded:
        while cache.layer_class_to_replicate in (None, DynamicLayer) and len(cache.layers) <= index:
            cache.layers.append(DynamicLayer())
        layer = cache.layers[index] if index < len(cache.layers) else None
    if type(layer) in (DynamicLayer, StaticLayer):
        is_traced = torch.compiler.is_compiling()  # there the host does not know
        if not is_traced and (count := int(layer.get_seq_length())) > 0:
            got = f"the {count} tokens of another"
            raise refusal("past_key_values", "empty or of this model", got=got)
        layer = cache.layers[index] = KVLayer(getattr(layer, "max_cache_len", None))
    if isinstance(layer, KVLayer):
        return layer
    kind = f"{'an offloaded ' * is_offloaded}{type(cache).__name__} of {type(layer).__name__}"
    hint = 'leave out cache_implementation, or give "static"'
    expected = "a DynamicCache or a StaticCache on the device with SparseAttention"
    raise refusal("past_key_values", expected, got=f"{kind}: {hint}")
