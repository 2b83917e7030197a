"""The attention module of a model of transformers: a `SparseAttention` behind its call.

B  batch            T  new tokens         S  tokens, past ones included
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from .. import varlen
from ..attention import SparseAttention
from ..checks.scalars import shown
from ..ranking import sampled
from . import masks
from .attention import check_call, layout_of, packed
from .kv_layer import KVLayer, StaticKVLayer, layer_of
from .masks import CONVERTED, LAYOUTS, remembered

# of a mask that all layers of a forward share
NEW: Any = WeakTensorKeyDictionary()


@dataclass
class Ranking:
    """What `ranking_losses` asks of the layers, and their losses by layer."""

    queries: Tensor
    weights: str
    losses: dict[int, Tensor] = field(default_factory=dict)

    @property
    def loss(self) -> Tensor:
        """The mean over layers.

        Raises:
            ValueError: no forward yet.
        """
        if not self.losses:
            raise ValueError("model must have been called within ranking_losses, got no forward")
        return torch.stack([loss.float() for loss in self.losses.values()]).mean()


class LayerAttention(nn.Module):
    """A `SparseAttention` with the call of an attention module of transformers.

    Attributes:
        attention: the layer.
        layer_idx: the layer's index in the model and in a cache.
        dropout: of the module that it replaces, which must be 0 in training.
        is_first: whether the layers after it may rely on its checks of a forward's inputs.
        ranking: set while `ranking_losses` is open.
    """

    ranking: Ranking | None = None

    def __init__(
        self,
        attention: SparseAttention,
        layer_idx: int,
        dropout: float = 0.0,
        is_first: bool = True,
    ):
        super().__init__()
        self.is_causal = True  # of the instance: guards of graphs then follow its dict alone
        self.attention = attention
        self.layer_idx = layer_idx
        self.dropout = dropout
        self.is_first = is_first

    def extra_repr(self) -> str:
        return f"layer_idx={self.layer_idx}"

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: Any = None,
        attention_mask: Tensor | None = None,
        past_key_values: Any = None,
        cache: Any = None,
        ranking_queries: Tensor | None = None,
        ranking_weights: str = "output",
        **others: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Attention of [B, T, dim] to these tokens and to those of the cache.

        Args:
            position_embeddings: not used: the layer has the frequencies of the model.
            attention_mask: of `sparse_mask`, or of the user, [B, 1, T, S].
            past_key_values, cache: a `DynamicCache` or a `StaticCache`, under its name in this
                release.
            ranking_queries: positions [m] of queries for the loss of a learned ranking, whose
                blocks are worth what `ranking_weights` says. `ranking_losses` sets them too.

        Returns:
            [B, T, dim], and the loss of the ranking if one learns, else None.

        Raises:
            ValueError: a mask, positions or a cache of another form, dropout, or weights asked for.
        """
        if others.get("output_attentions"):
            raise ValueError(
                "output_attentions must be False with SparseAttention, which forms no weights, got "
                "True: native_sparse_attention.view.collect(model) records what it reads"
            )
        check_call(self, self.dropout if self.training else 0.0, None, others)
        past_key_values = past_key_values if cache is None else cache
        held = None if past_key_values is None else layer_of(past_key_values, self.layer_idx)
        position_ids = others.get("position_ids")
        if self.ranking is not None:
            ranking_queries, ranking_weights = self.ranking.queries, self.ranking.weights
        B, T = hidden_states.shape[:2]
        mask, S = attention_mask, T if held is None else held.width(T)
        fixed = held if isinstance(held, StaticKVLayer) else None
        checked = self.is_first and not torch.compiler.is_compiling()
        if fixed is not None:
            fixed.begin(hidden_states.device)
            if checked:
                fixed.check_room(T)
        if mask is None and (held is None or not held.is_initialized):
            mask = packed(position_ids, B, T)
        elif mask is not None and masks.is_own(mask, S):
            mask = masks.received(mask, S)
        elif mask is not None:
            mask = remembered(CONVERTED, mask, masks.converted, (B, T, S))
            if fixed is not None and checked:
                fixed.check_end(mask, T)
        if mask is not None and (mask.dtype == torch.int64 or len(mask) == 0):
            mask = None  # the cache knows how many keys there are
        if checked and T > 1:
            check_positions(position_ids, mask, T)
        if held is None or (mask is not None and mask.shape[2] == 2):
            if held is not None:
                held.check_past(None)
                held.packed = True
                held.count(T, None)
            out, loss = self.whole(hidden_states, mask, ranking_queries, ranking_weights)
            if self.ranking is not None and loss is not None:
                self.ranking.losses[self.layer_idx] = loss
            return out, loss
        if ranking_queries is not None:
            raise ValueError("past_key_values must be None while rankings learn: use_cache=False")
        if fixed is not None:
            return self.over_static_cache(hidden_states, mask, fixed), None
        return self.over_cache(hidden_states, mask, held), None

    def whole(
        self, x: Tensor, mask: Tensor | None, queries: Tensor | None, weights: str
    ) -> tuple[Tensor, Tensor | None]:
        """Attention within whole sequences [B, T, dim], with padding or packed documents, and the
        loss of the ranking."""
        given: dict[str, Any] = {}
        loss = None
        if mask is not None:
            layout: varlen.Layout = remembered(
                LAYOUTS, mask, layout_of, (self.attention.alignment,)
            )
            x, given["documents"] = layout.spread(x), layout.documents
        if queries is not None and self.attention.to_index is not None:
            if mask is not None:  # where the layout puts them, -1 for padding
                to = layout.target
                queries = to[:, sampled(queries, to.shape[1], None, to.device)]
            given |= dict(ranking_queries=queries, ranking_weights=weights)
            out, loss = self.attention(x, **given)
        else:
            out = self.attention(x, **given)
        return (out if mask is None else layout.collect(out)), loss

    def over_cache(self, x: Tensor, mask: Tensor | None, held: KVLayer) -> Tensor:
        """Attention of new tokens [B, T, dim] to those of the cache too, which takes them."""
        T, real, new = x.shape[1], None, None
        if mask is not None:
            real = mask[:, 0, 0] > 0
            if real.shape[1] != held.slots + T:
                raise ValueError(
                    f"attention_mask must be of {held.slots + T} tokens, past ones included, got "
                    f"{real.shape[1]}"
                )
            new = remembered(NEW, mask, new_tokens, (T,))
        if self.is_first:
            held.check_past(None if real is None else real[:, : held.slots])
        out: Tensor = self.attention(x, cache=held.cache, mask=new)
        held.count(T, real)
        return out

    def over_static_cache(self, x: Tensor, mask: Tensor | None, held: StaticKVLayer) -> Tensor:
        """`over_cache` where only the device knows how many slots are taken."""
        T, given, tracing = x.shape[1], {}, torch.compiler.is_compiling()
        if mask is not None:
            real = mask[:, 0, 0] > 0  # of all slots, or of those up to the last token
            if self.is_first and not tracing:
                held.check_mask(real, T)
            at = held.slots + torch.arange(T, device=real.device)
            new = real.index_select(1, at.clamp(max=real.shape[1] - 1))
            if tracing or not bool(new.all()):
                given = dict(lengths=new[:, 0].int()) if T == 1 else dict(mask=new)
        elif self.is_first:
            held.check_past(None)
        out: Tensor = self.attention(x, cache=held.cache, **given)
        held.count(T, None)
        return out


def new_tokens(mask: Tensor, T: int) -> Tensor | None:
    """Which of the last T tokens [B, T] are no padding; None if all are."""
    new = mask[:, 0, 0, -T:] > 0
    return None if bool(new.all()) else new


def check_positions(position_ids: Any, mask: Tensor | None, T: int) -> None:
    """Check that the tokens of each document are at successive positions. Where they begin does not
    matter: rotary embedding depends on distances alone.

    Raises:
        ValueError: they are not.
    """
    if position_ids is None:
        return
    if not isinstance(position_ids, Tensor) or position_ids.ndim != 2:
        raise ValueError(f"position_ids must be [B, T] integers, got {shown(position_ids)}")
    positions, follows = position_ids, torch.ones_like(position_ids[:, 1:], dtype=torch.bool)
    if mask is not None:
        real = mask[:, 0, 0, -T:] > 0
        order = varlen.real_first(real)
        positions = positions.expand(len(real), -1).gather(1, order)
        follows = (torch.arange(1, T, device=real.device) < real.sum(1, keepdim=True)).bool()
        if mask.shape[2] == 2:
            begins = mask[:, 0, 1].cumsum(1).gather(1, order)
            follows = follows & (begins[:, 1:] == begins[:, :-1])
    if bool(((positions[:, 1:] - positions[:, :-1] != 1) & follows).any()):
        raise ValueError(
            "position_ids must count up by 1 within each sequence with SparseAttention, got "
            f"others: {masks.HINT}"
        )


def attention_modules(model: nn.Module) -> list[LayerAttention]:
    """The attention modules of a model that hold a `SparseAttention`.

    Raises:
        ValueError: there are none.
    """
    modules = model.modules() if isinstance(model, nn.Module) else ()
    found = [module for module in modules if isinstance(module, LayerAttention)]
    if not found:
        raise ValueError(
            "model must be one of convert(model), or an NSAModel or NSAForCausalLM, got "
            f"{type(model).__name__}"
        )
    return found


@contextmanager
def ranking_losses(model: nn.Module, queries: Tensor, weights: str = "output") -> Iterator[Ranking]:
    """Within the context each forward without a cache also computes the losses of the learned
    rankings, for queries at these positions [m]: `losses` by layer and `loss`, their mean. They are
    those of the last forward: of several, take `loss` after each. Close it after the backward,
    which may compute a forward again (activation checkpointing).

    Raises:
        ValueError: a model without such layers, or without `importance="index"`, or in such a
            context already.
    """
    layers = attention_modules(model)
    if all(layer.attention.to_index is None for layer in layers):
        raise ValueError(
            "model must have layers that rank by importance='index', got none in a "
            f"{type(model).__name__}"
        )
    if any(layer.ranking is not None for layer in layers):
        raise ValueError(
            "model must be in one context of ranking_losses, or in one call of distill, at a time, "
            "got a second one: close the first"
        )
    ranking = Ranking(queries, weights)
    try:
        for layer in layers:
            layer.ranking = ranking
        yield ranking
    finally:
        for layer in layers:
            layer.ranking = None
