"""Attention modules that hold a `SparseAttention`, and a decoder of them: `NSAForCausalLM`.

B  batch            T  new tokens         S  tokens, past ones included         V  vocabulary
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    DynamicCache,
    GenerationMixin,
    PreTrainedModel,
    initialization,
)
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils import can_return_tuple
from transformers.utils.output_capturing import capture_outputs

from .. import varlen
from ..attention import SparseAttention
from ..checks.scalars import shown
from ..frequencies import reset_frequencies
from ..ranking import sampled
from ..rotary import Rotary
from .attention import check_call
from .cache import KVLayer, StaticKVLayer, layer_of
from .configuration import NSAModelConfig
from .mask import HINT, NSAMask, nsa_mask, packed_uncompiled, read_mask, read_positions
from .settings import NAME

# the name of a cache in this release
CACHE = "cache" if hasattr(BaseModelOutputWithPast, "cache") else "past_key_values"


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


class NSAAttention(nn.Module):
    """A `SparseAttention` with the call of an attention module of transformers: the attention of
    `NSAModel`, and of models that `convert` has changed.

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
        attention_mask: NSAMask | Tensor | None = None,
        past_key_values: Any = None,
        cache: Any = None,
        ranking_queries: Tensor | None = None,
        ranking_weights: str = "output",
        **others: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Attention of [B, T, dim] to these tokens and to those of the cache.

        Args:
            position_embeddings: not used: the layer has the frequencies of the model.
            attention_mask: of `nsa_mask`, or of the user, [B, 1, T, S].
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
        if self.ranking is not None:
            ranking_queries, ranking_weights = self.ranking.queries, self.ranking.weights
        if isinstance(held, StaticKVLayer):
            held.begin(hidden_states.device)
        (B, T), position_ids = hidden_states.shape[:2], others.get("position_ids")
        mask = read_mask(attention_mask, B, T, T if held is None else held.get_mask_sizes(T)[0])
        checks = self.is_first and not torch.compiler.is_compiling()
        if attention_mask is None and (held is None or not held.is_initialized):
            mask = read_positions(position_ids, B, T)
        length = None if mask is None else mask.length
        if mask is not None and not mask.has_rows:
            mask = None  # the cache knows how many keys there are
        if checks and T > 1:
            check_positions(position_ids, mask, T)
        if held is None or (mask is not None and mask.documents is not None):
            if held is not None:  # which keeps none of it
                held.check_past(None)
                held.packed = True
                held.count(T, None)
            return self.attend_whole(hidden_states, mask, ranking_queries, ranking_weights)
        if ranking_queries is not None:
            raise ValueError("past_key_values must be None while rankings learn: use_cache=False")
        if not isinstance(held, StaticKVLayer):
            return self.attend_cache(hidden_states, mask, held), None
        if checks:
            held.check_new(T, length, None if mask is None else mask.tokens)
        return self.attend_static_cache(hidden_states, mask, held), None

    def attend_whole(
        self, x: Tensor, mask: NSAMask | None, queries: Tensor | None, weights: str
    ) -> tuple[Tensor, Tensor | None]:
        """Attention within whole sequences [B, T, dim], with padding or packed documents, and the
        loss of the ranking."""
        call: dict[str, Any] = {}
        layout = None if mask is None else mask.layout(self.attention.config.alignment)
        if layout is not None:
            x, call["documents"] = layout.spread(x), layout.documents
        loss = None
        if queries is None or self.attention.to_index is None:
            out = self.attention(x, **call)
        else:
            if layout is not None:  # where the layout puts them, -1 for padding
                to = layout.target
                queries = to[:, sampled(queries, to.shape[1], None, to.device)]
            call |= dict(ranking_queries=queries, ranking_weights=weights)
            out, loss = self.attention(x, **call)
            if self.ranking is not None:
                self.ranking.losses[self.layer_idx] = loss
        return (out if layout is None else layout.collect(out)), loss

    def attend_cache(self, x: Tensor, mask: NSAMask | None, held: KVLayer) -> Tensor:
        """Attention of new tokens [B, T, dim] to those of the cache too, which takes them."""
        T, tokens, new = x.shape[1], None, None
        if mask is not None:
            tokens = mask.tokens
            if tokens.shape[1] != held.slots + T:
                raise ValueError(
                    f"attention_mask must be of {held.slots + T} tokens, past ones included, got "
                    f"{tokens.shape[1]}"
                )
            new = mask.once(new_tokens, T)
        if self.is_first:
            held.check_past(None if tokens is None else tokens[:, : held.slots])
        out: Tensor = self.attention(x, cache=held.cache, mask=new)
        held.count(T, tokens)
        return out

    def attend_static_cache(self, x: Tensor, mask: NSAMask | None, held: StaticKVLayer) -> Tensor:
        """`attend_cache` where only the device knows how many slots are taken."""
        T, call = x.shape[1], {}
        if mask is not None:
            slots = held.slots + torch.arange(T, device=x.device)
            new = mask.tokens.index_select(1, slots.clamp(max=mask.tokens.shape[1] - 1))
            if torch.compiler.is_compiling() or not bool(new.all()):
                call = dict(lengths=new[:, 0].int()) if T == 1 else dict(mask=new)
        out: Tensor = self.attention(x, cache=held.cache, **call)
        held.count(T, None)
        return out


def new_tokens(mask: NSAMask, T: int) -> Tensor | None:
    """Which of the last T tokens [B, T] are no padding; None if all are."""
    new = mask.tokens[:, -T:]
    return None if bool(new.all()) else new


def check_positions(position_ids: Any, mask: NSAMask | None, T: int) -> None:
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
    documents = None if mask is None else mask.documents
    if mask is not None and mask.tokens is not None:
        real = mask.tokens[:, -T:]
        order = varlen.real_first(real)
        positions = positions.expand(len(real), -1).gather(1, order)
        follows = (torch.arange(1, T, device=real.device) < real.sum(1, keepdim=True)).bool()
        documents = None if documents is None else documents.gather(1, order)
    if documents is not None:
        follows = follows & (documents[:, 1:] == documents[:, :-1])
    if bool(((positions[:, 1:] - positions[:, :-1] != 1) & follows).any()):
        raise ValueError(
            "position_ids must count up by 1 within each sequence with SparseAttention, got "
            f"others: {HINT}"
        )


def attention_modules(model: nn.Module) -> list[NSAAttention]:
    """The attention modules of a model that hold a `SparseAttention`.

    Raises:
        ValueError: there are none.
    """
    modules = model.modules() if isinstance(model, nn.Module) else ()
    layers = [module for module in modules if isinstance(module, NSAAttention)]
    if not layers:
        raise ValueError(
            "model must be one of convert(model), or an NSAModel or NSAForCausalLM, got "
            f"{type(model).__name__}"
        )
    return layers


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


@dataclass
class NSAModelOutput(BaseModelOutputWithPast):
    """`ranking_loss`: the mean loss of the learned rankings over layers, if they learn."""

    ranking_loss: Tensor | None = None


@dataclass
class NSACausalLMOutput(CausalLMOutputWithPast):
    """`ranking_loss`: the mean loss of the learned rankings, a part of `loss`."""

    ranking_loss: Tensor | None = None


class NSAMLP(nn.Module):
    """SwiGLU: `down(silu(gate(x)) * up(x))`."""

    def __init__(self, config: NSAModelConfig):
        super().__init__()
        widths = config.hidden_size, config.intermediate_size
        self.gate_proj = nn.Linear(*widths, bias=False)
        self.up_proj = nn.Linear(*widths, bias=False)
        self.down_proj = nn.Linear(*widths[::-1], bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class NSADecoderLayer(GradientCheckpointingLayer):
    """`h = x + attention(norm(x))`, `y = h + mlp(norm(h))`."""

    def __init__(self, config: NSAModelConfig, index: int):
        super().__init__()
        attention = SparseAttention.from_config(
            config.layer_config_of(index), rope_theta=config.rope_theta
        )
        self.self_attn = NSAAttention(attention, index, is_first=index == 0)
        self.mlp = NSAMLP(config)
        self.input_layernorm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, hidden_states: Tensor, **arguments: Any) -> tuple[Tensor, Tensor | None]:
        """[B, T, hidden_size], and the loss of the ranking if one learns. They are the arguments
        of `NSAAttention`."""
        out, loss = self.self_attn(self.input_layernorm(hidden_states), **arguments)
        hidden_states = hidden_states + out
        return hidden_states + self.mlp(self.post_attention_layernorm(hidden_states)), loss


class NSAPreTrainedModel(PreTrainedModel):
    """What models of `NSAModelConfig` share: loading, saving and initial weights."""

    config_class = NSAModelConfig
    config: NSAModelConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _can_compile_fullgraph = True
    _no_split_modules = ("NSADecoderLayer",)
    _skip_keys_device_placement = ("cache", "past_key_values")
    _can_record_outputs = {"hidden_states": NSADecoderLayer}  # noqa: RUF012

    def _check_and_adjust_attn_implementation(
        self, attn_implementation: str | None, *args: Any, **kwargs: Any
    ) -> str:
        # "eager" is what transformers calls a model's own attention
        if attn_implementation not in (None, NAME, "eager"):
            raise ValueError(
                f"attn_implementation must be {NAME!r}, 'eager' or None in a "
                f"{type(self).__name__}, whose layers are SparseAttention, got "
                f"{shown(attn_implementation)}: backend in config.nsa chooses among its own"
            )
        return attn_implementation or NAME

    def _initialize_weights(self, module: nn.Module, *args: Any, **kwargs: Any) -> None:
        # `_init_weights` itself leaves loaded weights alone: not what is asked of code elsewhere
        super()._initialize_weights(module)

    def _init_weights(self, module: nn.Module) -> None:
        """Draw what no checkpoint has given: projections and embeddings with `initializer_range`,
        all else as `SparseAttention` begins."""
        super()._init_weights(module)
        if isinstance(module, Rotary):
            reset_frequencies(module)
        elif isinstance(module, SparseAttention):
            start(module, self.config.initializer_range)


def start(layer: SparseAttention, std: float) -> None:
    """Set the weights of a layer that are not loaded to initial values."""
    weights = list(layer.parameters())
    loaded = [p for p in weights if getattr(p, "_is_hf_initialized", False)]
    if len(loaded) == len(weights):
        return
    values = [p.detach().clone() for p in loaded]
    layer.reset_parameters()
    with torch.no_grad():
        for parameter, value in zip(loaded, values, strict=True):
            parameter.copy_(value)
    for projection in (layer.to_qkv, layer.combine_heads, layer.to_index):
        if projection is not None:
            initialization.normal_(projection.weight, std=std)
            if projection.bias is not None:
                initialization.zeros_(projection.bias)


class NSAModel(NSAPreTrainedModel):
    """Embedding, `num_hidden_layers` layers, and a norm: a decoder without a head.

    Each layer is `h = x + attention(norm(x))`, `y = h + swiglu(norm(h))` with RMSNorm, and a
    `SparseAttention` of the settings in `config.nsa` as its attention.

    Args:
        config: the sizes and settings.
    """

    def __init__(self, config: NSAModelConfig):
        config.check()
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, config.pad_token_id)
        self.layers = nn.ModuleList(
            NSADecoderLayer(config, index) for index in range(config.num_hidden_layers)
        )
        self.norm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.gradient_checkpointing = False
        self.post_init()

    @capture_outputs
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | NSAMask | None = None,
        position_ids: Tensor | None = None,
        cache: Any = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        past_key_values: Any = None,
        ranking_queries: int | Tensor | None = None,
        ranking_weights: str = "output",
        **kwargs: Any,
    ) -> NSAModelOutput:
        """Hidden states of tokens.

        Args:
            input_ids, inputs_embeds: one of them: [B, T] token ids, or [B, T, hidden_size].
            attention_mask: [B, S] of past and new tokens, 0 for padding, on either side. The
                position of a token is the number of tokens before it.
            position_ids: [B, T] without attention_mask: they count up by 1, and return to 0 in
                packed sequences.
            cache, past_key_values: a `DynamicCache` or `StaticCache` of earlier calls, by either
                name.
            use_cache: whether to return a cache; by default `config.use_cache` in inference mode,
                and False in training mode and while rankings learn.
            ranking_queries, ranking_weights: with importance="index", also return `ranking_loss`,
                as `SparseAttention` computes it for so many queries, or for those at positions [m].

        Returns:
            last_hidden_state [B, T, hidden_size], the cache, and `ranking_loss`.

        Raises:
            ValueError: neither or both of ids and embeddings, or a mask, positions or a cache of
                another form.
        """
        if (input_ids is None) == (inputs_embeds is None):
            got = "neither" if input_ids is None else "both"
            raise ValueError(f"give one of input_ids and inputs_embeds, got {got}")
        x = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        cache = past_key_values if cache is None else cache
        if use_cache is None:
            use_cache = self.config.use_cache and not self.training and ranking_queries is None
        if use_cache and cache is None:
            cache = DynamicCache(config=self.config)
        mask: Any = attention_mask
        positions = position_ids
        B, T = x.shape[:2]
        if isinstance(mask, Tensor) and mask.ndim == 2:
            past = 0 if cache is None else cache.get_seq_length()
            S = T if cache is None else layer_of(cache, 0).get_mask_sizes(T)[0]
            mask = nsa_mask(B, T, S, past, attention_mask=mask, device=x.device)
            positions = None  # the mask says them
        looks = torch.compiler.is_compiling() and mask is None and cache is None
        if looks and positions is not None and positions.ndim == 2:
            mask = packed_uncompiled(positions, B)
        arguments: dict[str, Any] = dict(
            kwargs, attention_mask=mask, position_ids=positions, **{CACHE: cache}
        )
        if ranking_queries is not None:
            self.check_ranking()
            queries = sampled(ranking_queries, x.shape[1], None, x.device)
            arguments |= dict(ranking_queries=queries, ranking_weights=ranking_weights)
        losses = []
        for layer in self.layers:
            x, loss = layer(x, **arguments)
            losses += [] if loss is None else [loss.float()]
        mean = None
        if ranking_queries is not None:
            mean = torch.stack([loss.to(x.device) for loss in losses]).mean()
        return NSAModelOutput(last_hidden_state=self.norm(x), ranking_loss=mean, **{CACHE: cache})

    def check_ranking(self) -> None:
        """Check that a layer has a ranking that learns."""
        layers: list[Any] = list(self.layers)
        if all(layer.self_attn.attention.to_index is None for layer in layers):
            importance = self.config.nsa["importance"]
            raise ValueError(
                f"ranking_queries goes with importance='index' in config.nsa, got {importance!r}"
            )


class NSAForCausalLM(NSAPreTrainedModel, GenerationMixin):
    """`NSAModel` with a head that predicts the next token.

    Args:
        config: the sizes and settings.
    """

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012

    def __init__(self, config: NSAModelConfig):
        super().__init__(config)
        self.model = NSAModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | NSAMask | None = None,
        position_ids: Tensor | None = None,
        cache: Any = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        past_key_values: Any = None,
        ranking_queries: int | Tensor | None = None,
        ranking_weights: str | None = None,
        **kwargs: Any,
    ) -> NSACausalLMOutput:
        """Logits of next tokens, and their loss.

        Args:
            labels: [B, T] ids, -100 for tokens that have no loss. They are shifted here: the logits
                of token t predict label t + 1.
            logits_to_keep: so many last tokens, or tokens at these indices, get logits; 0 for all.
            ranking_queries, ranking_weights: as in `NSAModel`. By default those of the
                configuration, in training mode with labels.
            others: as in `NSAModel`.

        Returns:
            logits [B, T, V], the cache, `ranking_loss`, and `loss`: the mean cross-entropy in nats,
            plus `ranking_loss`. Without labels `loss` is None.

        Raises:
            ValueError: as `NSAModel`.
        """
        if ranking_queries is None and self.training and labels is not None:
            ranking_queries = self.config.ranking_queries
        out = self.model(
            input_ids=input_ids, attention_mask=attention_mask, position_ids=position_ids,
            cache=cache, inputs_embeds=inputs_embeds, use_cache=use_cache,
            past_key_values=past_key_values, ranking_queries=ranking_queries,
            ranking_weights=ranking_weights or self.config.ranking_weights, **kwargs,
        )  # fmt: skip
        x = out.last_hidden_state
        if isinstance(logits_to_keep, int):
            x = x[:, -logits_to_keep:] if logits_to_keep else x
        else:
            x = x[:, logits_to_keep]
        logits = self.lm_head(x)
        loss = None
        if labels is not None:
            loss = self.loss_function(
                logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs
            )
            if out.ranking_loss is not None:
                loss = loss + self.part(out.ranking_loss, labels, kwargs).to(loss.device)
        return NSACausalLMOutput(
            loss=loss, logits=logits, hidden_states=out.hidden_states,
            attentions=out.attentions, ranking_loss=out.ranking_loss,
            **{CACHE: getattr(out, CACHE)},
        )  # fmt: skip

    @staticmethod
    def part(ranking_loss: Tensor, labels: Tensor, arguments: dict[str, Any]) -> Tensor:
        """The part of a ranking loss in an accumulated gradient: where `num_items_in_batch` labels
        of several calls divide the loss of predictions, that of this call's labels."""
        count = arguments.get("num_items_in_batch")
        return ranking_loss if count is None else ranking_loss * ((labels != -100).sum() / count)


def register() -> None:
    """Make the Auto classes of transformers know the models, and Trainer, which shifts labels of
    smoothing by the names of classes alone."""
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.setdefault(NSAModelConfig.model_type, NSAForCausalLM.__name__)
    AutoConfig.register(NSAModelConfig.model_type, NSAModelConfig, exist_ok=True)
    AutoModel.register(NSAModelConfig, NSAModel, exist_ok=True)
    AutoModelForCausalLM.register(NSAModelConfig, NSAForCausalLM, exist_ok=True)
