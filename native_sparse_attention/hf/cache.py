"""A cache of transformers that also keeps the compressed keys of windows, which rank blocks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary
from transformers.cache_utils import DynamicCache, DynamicLayer

from ..compress import unfold, windows_of
from .settings import settings_of

# the compressed keys [B K W D] of keys that a cache has returned
KEPT: Any = WeakTensorKeyDictionary()


def kept_compressed_keys(key: Tensor, W: int) -> Tensor | None:
    """The W compressed keys [B K W D] that a `SparseCache` keeps with these keys, if it does."""
    kept = None if torch.compiler.is_compiling() else KEPT.get(key)
    return kept if kept is not None and kept.shape[2] == W else None


class SparseLayer(DynamicLayer):
    """Keys and values [B K S D] of a layer, and the mean keys [B K W D] of its windows."""

    def __init__(self, l: int, d: int, **unknown: Any) -> None:
        super().__init__()
        self.l, self.d = l, d
        self.compressed: Tensor | None = None

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        keys, values = super().update(key_states, value_states, *args, **kwargs)
        self.compress(keys)
        if not torch.compiler.is_compiling():
            KEPT[keys] = self.compressed
        return keys, values

    def compress(self, keys: Tensor) -> None:
        """Add the windows that the newest tokens complete."""
        l, d, S = self.l, self.d, keys.shape[2]
        done = 0 if self.compressed is None else self.compressed.shape[2]
        if self.compressed is None or done * d < l:  # windows that begin before the first token
            self.compressed = windows_of(keys, l, d, True).mean(dim=-2)
        elif S // d > done:
            windows = unfold(keys[:, :, (done + 1) * d - l :], l, d)
            self.compressed = torch.cat((self.compressed, windows.mean(dim=-2)), dim=2)

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
            self.compressed = self.compressed[:, :, : self.get_seq_length() // self.d]

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
    """A `DynamicCache` that keeps the compressed keys of a model under sparse attention.

    `model.generate(..., past_key_values=SparseCache(model.config))`; newer releases call it
    `cache`. It saves the reading of all keys at each step where windows hold several tokens
    (`compress_block_size` above 1). Otherwise keys rank blocks themselves, and it is a
    `DynamicCache`.

    Args:
        config: `model.config`, after `use_sparse_attention(model)`.
    """

    def __init__(self, config: Any) -> None:
        super().__init__(config=config)
        settings = settings_of(config.get_text_config(decoder=True))
        l, d = settings["compress_block_size"], settings["compress_block_sliding_stride"]
        if l == d == 1:
            return
        self.layers: list[Any] = [
            SparseLayer(l, d) if type(layer) is DynamicLayer else layer for layer in self.layers
        ]
