"""A cache of transformers that copies nothing at a step, and keeps the compressed keys of windows,
which rank blocks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary
from transformers import PreTrainedConfig
from transformers.cache_utils import DynamicCache, DynamicLayer, StaticCache, StaticLayer

from ..checks.scalars import check_int, shown
from ..compress import unfold, windows_of
from ..ops.decode import workspace
from .settings import settings_of

# tokens that storage has room for beyond those that are there, at least; else an eighth of them
LEAST_ROOM = 64
# of keys that a cache has returned
KEPT: Any = WeakTensorKeyDictionary()


@dataclass(frozen=True)
class Kept:
    """What a `SparseCache` keeps with the keys that it returned.

    compressed: the compressed keys [B K W D], where windows hold several tokens.
    stores: storage [B K N D] of "keys", "values" and "compressed", longer than the tensors that
        are there; its shapes stay for many steps. Empty where autograd saves what a call returned.
    counters: `ops.decode.workspace` of that storage.
    windows: (l, d), tokens of a window of the compressed keys and from window to window.
    """

    compressed: Tensor | None
    stores: dict[str, Tensor]
    counters: Tensor | None
    windows: tuple[int, int]


def kept_with(key: Tensor) -> Kept | None:
    """What the cache keeps that returned these keys, if it is a `SparseCache`."""
    kept: Kept | None = None if torch.compiler.is_compiling() else KEPT.get(key)
    return kept


def means_with(key: Tensor, l: int, d: int) -> Tensor | None:
    """The compressed keys [B W K D] of all the storage that `StaticSparseCache` returned, if it has
    such windows. Those that hold tokens that are not written have any value."""
    # an attribute: a graph reads it where it cannot look for tensors in a dictionary
    found: Tensor | None = None if l == d == 1 else getattr(key, f"nsa_means_{l}_{d}", None)
    return None if found is None else found[:, :, : key.shape[2] // d].transpose(1, 2)


class RoomyLayer(DynamicLayer):
    """Keys and values [B K S D] of a layer, in storage with room for more: a step writes its own
    tokens, where a `DynamicLayer` copies all others too.

    What an update returned stays as it was until tokens are taken back (`crop`) and others written.
    """

    def __init__(self, **unknown: Any) -> None:
        super().__init__()
        self.keys: Tensor
        self.values: Tensor
        self.windows = (1, 1)
        self.stores: dict[str, Tensor] = {}
        self.counters: Tensor | None = None
        self.compressed: Tensor | None = None

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        if torch.compiler.is_compiling():
            keys, values = super().update(key_states, value_states, *args, **kwargs)
            self.compress(keys)
            return keys, values
        # autograd saves what a call returned
        if torch.is_grad_enabled() or not self.is_initialized:
            super().update(key_states, value_states, *args, **kwargs)
            self.compress(self.keys)
            KEPT[self.keys] = Kept(self.compressed, {}, None, self.windows)
            return self.keys, self.values
        self.keys = self.extended("keys", self.keys, key_states)
        self.values = self.extended("values", self.values, value_states)
        self.compress(self.keys)
        B, K = self.keys.shape[:2]
        if self.counters is None or self.counters.shape[:2] != (B, K):
            self.counters = workspace(B, K, self.keys.device)
        held = dict(keys=self.keys, values=self.values, compressed=self.compressed)
        stores = {name: store for name, store in self.stores.items() if begins(store, held[name])}
        KEPT[self.keys] = Kept(self.compressed, stores, self.counters, self.windows)
        return self.keys, self.values

    def compress(self, keys: Tensor) -> None:
        """Add the windows that the newest tokens complete."""

    def extended(self, name: str, held: Tensor, new: Tensor, every: int = 1) -> Tensor:
        """The held entries [B K n D] of `every` tokens each, and the new ones after them."""
        if held.ndim != 4 or not fits(held, new):
            return torch.cat((held, new), dim=-2)
        S, most = held.shape[2], held.shape[2] + new.shape[2]
        store = self.stores.get(name)
        if store is None or not (
            begins(store, held) and fits(store, new) and store.shape[2] >= most
        ):
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


def begins(store: Tensor | None, held: Tensor | None) -> bool:
    """Whether the storage begins with what is held: crops leave a begin, other calls another
    tensor."""
    return store is not None and held is not None and store.data_ptr() == held.data_ptr()


def fits(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors differ in their length alone."""
    kinds = ((t.dtype, t.device, t.shape[:2], t.shape[3:], t.is_inference()) for t in (one, other))
    return len(set(kinds)) == 1


class SparseLayer(RoomyLayer):
    """Also the mean keys [B K W D] of a layer's windows."""

    def __init__(self, l: int, d: int, **unknown: Any) -> None:
        super().__init__()
        self.windows = (l, d)

    def compress(self, keys: Tensor) -> None:
        (l, d), S = self.windows, keys.shape[2]
        done = 0 if self.compressed is None else self.compressed.shape[2]
        if self.compressed is None or done * d < l:  # windows that begin before the first token
            self.compressed = windows_of(keys, l, d, True).mean(dim=-2)
            return
        grows = torch.is_grad_enabled() or torch.compiler.is_compiling()
        # without a new window too, a first step moves them to storage, whose shapes stay
        if S // d == done and (grows or begins(self.stores.get("compressed"), self.compressed)):
            return
        windows = unfold(keys[:, :, (done + 1) * d - l :], l, d).mean(dim=-2)
        if grows:
            self.compressed = torch.cat((self.compressed, windows), dim=2)
        else:
            self.compressed = self.extended("compressed", self.compressed, windows, d)

    def reset(self) -> None:
        self.compressed = None
        super().reset()

    def offload(self) -> None:
        super().offload()
        if self.compressed is not None:
            self.compressed = self.compressed.to("cpu", non_blocking=True)

    def prefetch(self) -> None:
        super().prefetch()
        if self.compressed is not None:
            self.compressed = self.compressed.to(self.device, non_blocking=True)

    def crop(self, tokens_to_remove: int) -> None:
        super().crop(tokens_to_remove)
        if self.compressed is not None:
            self.compressed = self.compressed[:, :, : self.get_seq_length() // self.windows[1]]

    def reorder_cache(self, beam_idx: Tensor) -> None:
        super().reorder_cache(beam_idx)
        if self.compressed is not None:
            index = beam_idx.to(self.compressed.device)
            self.compressed = self.compressed.index_select(0, index)

    def batch_repeat_interleave(self, repeats: int) -> None:
        super().batch_repeat_interleave(repeats)
        if self.compressed is not None:
            self.compressed = self.compressed.repeat_interleave(repeats, dim=0)

    def batch_select_indices(self, indices: Tensor) -> None:
        super().batch_select_indices(indices)
        if self.compressed is not None:
            self.compressed = self.compressed[indices, ...]


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
        l, d = windows_by(config)
        super().__init__(config=config)

        def own(layer: Any) -> Any:
            if type(layer) is not DynamicLayer:
                return layer
            return RoomyLayer() if l == d == 1 else SparseLayer(l, d)

        self.layers: list[Any] = [own(layer) for layer in self.layers]


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
        self.attach()

    def attach(self) -> None:
        l, d = self.windows
        setattr(self.keys, f"nsa_means_{l}_{d}", self.means)

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

    def reset(self) -> None:
        super().reset()
        if self.is_initialized:
            self.means.zero_()

    def reorder_cache(self, beam_idx: Tensor) -> None:
        super().reorder_cache(beam_idx)
        if self.is_initialized:
            self.means = self.means.index_select(0, beam_idx.to(self.means.device))
            self.attach()

    def offload(self) -> None:
        super().offload()
        if self.is_initialized:
            self.means = self.means.to("cpu", non_blocking=True)
            self.attach()

    def prefetch(self) -> None:
        super().prefetch()
        if self.is_initialized:
            self.means = self.means.to(self.device, non_blocking=True)
            self.attach()


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
        l, d = windows_by(config)
        max_cache_len = check_int("max_cache_len", max_cache_len, 1)
        super().__init__(config=config, max_cache_len=max_cache_len, **others)
        if l > 1 or d > 1:
            self.layers: list[Any] = [
                StaticSparseLayer(l, d, max_cache_len) if type(layer) is StaticLayer else layer
                for layer in self.layers
            ]


def windows_by(config: Any) -> tuple[int, int]:
    """Tokens of a window of the compressed keys, and from window to window, by `model.config`."""
    if not isinstance(config, PreTrainedConfig):
        raise ValueError(f"config must be model.config, got {shown(config)}")
    settings = settings_of(config.get_text_config(decoder=True))
    return settings["compress_block_size"], settings["compress_block_sliding_stride"]
