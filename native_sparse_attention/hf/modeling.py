"""A decoder of transformers whose layers are `SparseAttention`.

B  batch            T  new tokens         V  vocabulary
"""

from __future__ import annotations

from dataclasses import dataclass
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

from ..attention import SparseAttention
from ..checks.scalars import shown
from ..frequencies import reset_frequencies
from ..ranking import sampled
from ..rotary import Rotary
from .configuration import NSAModelConfig
from .kv_layer import layer_of
from .layer import LayerAttention
from .masks import passed, positions_uncompiled, sparse_mask
from .model import NAME

# the name of a cache in this release
CACHE = "cache" if hasattr(BaseModelOutputWithPast, "cache") else "past_key_values"


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
        self.self_attn = LayerAttention(attention, index, is_first=index == 0)
        self.mlp = NSAMLP(config)
        self.input_layernorm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, hidden_states: Tensor, **given: Any) -> tuple[Tensor, Tensor | None]:
        """[B, T, hidden_size], and the loss of the ranking if one learns. `given` are the arguments
        of `LayerAttention`."""
        found, loss = self.self_attn(self.input_layernorm(hidden_states), **given)
        hidden_states = hidden_states + found
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
        attention_mask: Tensor | None = None,
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
        mask, positions = attention_mask, position_ids
        if mask is not None and mask.ndim == 2:
            past = 0 if cache is None else cache.get_seq_length()
            B, T = x.shape[:2]
            S = T if cache is None else layer_of(cache, 0).width(T)
            mask = sparse_mask(B, T, S, past, attention_mask=mask, device=x.device)
            positions = None  # the mask says them
        is_compiled = torch.compiler.is_compiling() and mask is None and cache is None
        if is_compiled and positions is not None and positions.ndim == 2:
            found = positions_uncompiled(positions, x.shape[0])
            mask = None if found is None else passed(found, x.shape[1])
        given: dict[str, Any] = dict(
            kwargs, attention_mask=mask, position_ids=positions, **{CACHE: cache}
        )
        if ranking_queries is not None:
            self.check_ranking()
            queries = sampled(ranking_queries, x.shape[1], None, x.device)
            given |= dict(ranking_queries=queries, ranking_weights=ranking_weights)
        losses = []
        for layer in self.layers:
            x, loss = layer(x, **given)
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
        attention_mask: Tensor | None = None,
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
    def part(ranking_loss: Tensor, labels: Tensor, given: dict[str, Any]) -> Tensor:
        """The part of a ranking loss in an accumulated gradient: where `num_items_in_batch` labels
        of several calls divide the loss of predictions, that of this call's labels."""
        count = given.get("num_items_in_batch")
        return ranking_loss if count is None else ranking_loss * ((labels != -100).sum() / count)


def register() -> None:
    """Make the Auto classes of transformers know the models, and Trainer, which shifts labels of
    smoothing by the names of classes alone."""
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.setdefault(NSAModelConfig.model_type, NSAForCausalLM.__name__)
    AutoConfig.register(NSAModelConfig.model_type, NSAModelConfig, exist_ok=True)
    AutoModel.register(NSAModelConfig, NSAModel, exist_ok=True)
    AutoModelForCausalLM.register(NSAModelConfig, NSAForCausalLM, exist_ok=True)
