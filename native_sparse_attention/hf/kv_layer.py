"""Layers of transformers caches that hold the KV cache of a `SparseAttention`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicLayer, StaticLayer

from ..cache.kv_cache import KVCache


class KVLayer(CacheLayerMixin):
    """The tokens of one layer in a `KVCache`. transformers counts slots, padding included.

    Attributes:
        cache: the tokens themselves, without padding.
        slots: tokens of each sequence with padding.
        real: [B, slots], whether a slot holds a token; None if all do.
        packed: whether the only forward so far had packed documents, which are not kept.
    """

    is_sliding = False
    is_croppable = True

    def __init__(self, **unknown: Any) -> None:
        super().__init__()
        self.cache = KVCache()
        self.slots = 0
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

    def width(self, new: int) -> int:
        """Keys of a mask for so many new tokens."""
        return self.slots + new

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
        if not self.slots:
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
        return self.slots

    def get_max_length(self) -> int:
        return -1

    get_max_cache_shape = get_max_length  # in older releases

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
        # a tensor after the first call: compiled steps count in place
        self.slots: Any = 0

    def width(self, new: int) -> int:
        return self.max_cache_len

    def begin(self, device: torch.device) -> None:
        """Count slots on a device from the first call on."""
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

    def check_past(self, real: Tensor | None) -> None:
        if not torch.compiler.is_compiling():  # there the host does not know
            super().check_past(real)

    def check_room(self, new: int) -> None:
        """Check that `new` slots are left.

        Raises:
            ValueError: there are fewer.
        """
        past = int(self.slots)
        if past + new > self.max_cache_len:
            raise ValueError(
                f"past_key_values is full: it holds {past} of {self.max_cache_len} tokens, got "
                f"{new} more"
            )

    def check_end(self, mask: Tensor | None, new: int) -> None:
        """Check that a mask of the user shows keys up to the last of `new` tokens, and no more.

        Raises:
            ValueError: it does not.
        """
        end, last = int(self.slots) + new, self.max_cache_len
        if mask is not None:
            last = int(mask[0]) if mask.dtype == torch.int64 else mask.shape[3]
        if last != end:
            raise ValueError(
                f"attention_mask must show the {end} keys up to the last new token, got {last}"
            )

    def check_mask(self, real: Tensor, new: int) -> None:
        """Check a mask [B, slots] of past tokens and of `new` ones.

        Raises:
            ValueError: fewer slots, or padding that earlier masks did not hide.
        """
        past = int(self.slots)
        if real.shape[1] < past + new:
            raise ValueError(
                f"attention_mask must be of {past + new} tokens, past ones included, got "
                f"{real.shape[1]}"
            )
        self.check_past(real[:, :past])

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.max_cache_len, 0

    def get_max_length(self) -> int:
        return self.max_cache_len

    get_max_cache_shape = get_max_length

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
    known = isinstance(cache, Cache) and (
        cache.layer_class_to_replicate in (None, DynamicLayer) and not cache.offloading
    )
    if known:
        while len(cache.layers) <= index:
            cache.layers.append(DynamicLayer())
        layer = cache.layers[index]
        if isinstance(layer, KVLayer):
            return layer
        if type(layer) in (DynamicLayer, StaticLayer):
            tracing = torch.compiler.is_compiling()  # there the host does not know
            if not tracing and (held := int(layer.get_seq_length())) > 0:
                raise ValueError(
                    f"past_key_values must be empty or of this model, got the {held} tokens of "
                    "another"
                )
            is_static = type(layer) is StaticLayer
            found = StaticKVLayer(layer.max_cache_len) if is_static else KVLayer()
            cache.layers[index] = found
            return found
    name = type(cache).__name__
    if getattr(cache, "offloading", False):
        name = f"an offloaded {name}"
    raise ValueError(
        "past_key_values must be a DynamicCache or a StaticCache on the device with "
        f"SparseAttention, whose layers keep a KVCache, got {name} of "
        f"{sorted({type(layer).__name__ for layer in getattr(cache, 'layers', [])})}: leave out "
        'cache_implementation, or give "static"'
    )
