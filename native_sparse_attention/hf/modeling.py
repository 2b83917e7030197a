"""Attention modules that hold a `SparseAttention`, and a Llama of them: `NSAForCausalLM`.

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
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM
from transformers.cache_utils import Cache
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.models.llama import LlamaForCausalLM, LlamaModel, LlamaPreTrainedModel
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaMLP
from transformers.utils import TransformersKwargs, can_return_tuple

from ..attention import SparseAttention
from ..checks import (
    INTEGER_DTYPES,
    check_bool,
    check_choice,
    check_ids,
    check_int,
    check_keywords,
    check_shapes,
    check_tensor,
    check_type,
    describe,
    is_strided,
    refusal,
)
from ..ranking import WEIGHTS, sampled
from ..rotary import Rotary
from .cache import layer_of
from .configuration import NAME, NSAModelConfig
from .mask import NSAMask, check_call


@dataclass
class Ranking:
    """What learned rankings learn from in a forward, and their losses by layer."""

    queries: Tensor
    weights: str = "output"
    losses: dict[int, Tensor] = field(default_factory=dict)
    learns: bool = False  # whether a layer's `to_index` is trained

    @property
    def loss(self) -> Tensor:
        """The mean over layers."""
        losses = [*self.losses.values()]
        if not losses:
            raise ValueError("model must have been called within ranking_losses, got no forward")
        loss = torch.stack([loss.to(losses[0].device, torch.float32) for loss in losses]).mean()
        if torch.is_grad_enabled() and self.learns and not loss.requires_grad:
            raise ValueError(
                "model must be checkpointed without use_reentrant=True, under which rankings learn "
                "nothing: give gradient_checkpointing_enable dict(use_reentrant=False)"
            )
        return loss


class NSAAttention(nn.Module):
    """A `SparseAttention` with the call of an attention module of transformers: the attention of
    `NSAModel` and of converted models. `dropout`, of the replaced module, must be 0 in training."""

    ranking: Ranking | None = None

    def __init__(
        self, attention: SparseAttention, layer_idx: int, dropout: float = 0.0,
        ranking_layer: int | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        if ranking_layer is not None and "selected" not in attention.branches:
            raise refusal("share_ranking", "None without the selected branch", attention.branches)
        self.attention = attention
        self.layer_idx = layer_idx
        self.dropout = dropout
        self.ranking_layer = ranking_layer  # whose block indices it gives to others or takes

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: Any = None,
        attention_mask: Any = None,
        past_key_values: Any = None,
        cache: Any = None,
        ranking: Ranking | None = None,
        **options: Any,
    ) -> tuple[Tensor, None]:
        """Attention [B, T, dim] to these tokens and to those of the cache. `ranking` takes the loss
        of a learned ranking; `ranking_losses` sets it too."""
        cache = past_key_values if cache is None else cache
        options |= dict(dropout=self.dropout if self.training else 0.0, use_cache=cache is not None)
        x, (B, T, _), layout = hidden_states, hidden_states.shape, None
        mask = NSAMask(T) if attention_mask is None else attention_mask
        mask = check_call(self, mask, (B, T), x.device, options)
        positions: Any = options.get("position_ids")
        is_traced = torch.compiler.is_compiling()
        if positions is not None and not is_traced and positions.shape[-1:] != (T,):
            raise refusal("position_ids", f"of {T} tokens", positions)
        ranking = self.ranking if ranking is None else ranking
        if cache is not None and ranking is not None:
            raise ValueError("past_key_values must be None while rankings learn: use_cache=False")
        call: dict[str, Any] = {}
        gives, s = self.ranking_layer == self.layer_idx, self.attention.config.selection_block_size
        if gives:
            call["return_block_indices"] = True
        elif self.ranking_layer is not None:
            call["block_indices"] = mask.shared_indices(self.ranking_layer, x.device)
        if cache is not None:
            out = layer_of(cache, self.layer_idx).attend(self.attention, x, mask, **call)
            if gives:
                out, mask.block_indices[self.layer_idx] = out
            return out, None
        if mask.tokens is not None or mask.documents is not None:
            layout = mask.share(NSAMask.layout, self.attention.config.alignment)
            x, call["documents"] = layout.spread(x), layout.documents
            if "block_indices" in call:
                call["block_indices"] = layout.spread_blocks(call["block_indices"], s)
        learning = None if self.attention.to_index is None else ranking
        if learning is not None:
            queries = learning.queries.to(x.device)
            if layout is not None:  # where the layout puts them, -1 for padding
                queries = layout.target[:, sampled(queries, T, None, x.device)]
            call |= dict(ranking_queries=queries, ranking_weights=learning.weights)
        out = self.attention(x, **call)
        out, *others = out if isinstance(out, tuple) else (out,)
        if learning is not None:
            learning.losses[self.layer_idx] = others[0]
            learning.learns |= self.attention.to_index.weight.requires_grad
        if gives:  # of the tokens in the caller's order: rows of groups of blocks are longer
            indices = others[-1] if layout is None else layout.collect_blocks(others[-1], s)
            mask.block_indices[self.layer_idx] = indices
        return (out if layout is None else layout.collect(out)), None


@contextmanager
def ranking_losses(model: nn.Module, queries: Tensor, weights: str = "output") -> Iterator[Ranking]:
    """Within the context each forward without a cache also computes the losses of the learned
    rankings, for queries at these positions [m]: `losses` by layer and `loss`, their mean, of the
    last forward. Close it after the backward, which may compute a forward again (checkpointing).

    Raises:
        ValueError: a model without layers of `importance="index"`, or in such a context already.
    """
    check_type("model", model, nn.Module, "an nn.Module")
    if not is_strided(queries) or queries.dtype not in INTEGER_DTYPES or queries.ndim != 1:
        raise refusal("queries", "positions [m], a tensor of integers", queries)
    check_choice("weights", weights, WEIGHTS)
    layers = [m for m in model.modules() if isinstance(m, NSAAttention) and m.attention.to_index]
    if not layers:
        kinds = "one of convert(model) or an NSAModel, with layers of importance='index'"
        raise ValueError(f"model must be {kinds}, got a {type(model).__name__} without")
    if any(layer.ranking is not None for layer in layers):
        raise ValueError("model must be in one ranking_losses or distill, got a second one")
    ranking = Ranking(queries, weights)
    try:
        for layer in layers:
            layer.ranking = ranking
        yield ranking
    finally:
        for layer in layers:
            layer.ranking = None


@dataclass
class NSACausalLMOutput(CausalLMOutputWithPast):
    """`ranking_loss`: the mean loss of the learned rankings, a part of `loss`."""

    ranking_loss: Tensor | None = None


class NSADecoderLayer(LlamaDecoderLayer):
    """`h = x + attention(norm(x))`, `y = h + mlp(norm(h))`."""

    def __init__(self, config: NSAModelConfig, index: int):
        GradientCheckpointingLayer.__init__(self)
        layer = config.layer_config_of(index)
        attention = SparseAttention.from_config(layer, rope_theta=config.rope_theta)
        ranking_layer = config.check_ranking_layers().get(index)
        self.self_attn = NSAAttention(attention, index, ranking_layer=ranking_layer)
        self.mlp = LlamaMLP(config)
        self.input_layernorm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)


def no_positions(x: Tensor, position_ids: Tensor) -> None:
    """In place of the rotary embedding of a Llama: layers have their own."""


def check_inputs(input_ids: Any, inputs_embeds: Any, embedding: nn.Module) -> Tensor | None:
    """Check what a model is called on. Returns the ids as int64."""
    if inputs_embeds is not None:
        check_shapes(inputs_embeds=(inputs_embeds, "b n d"))
    return None if input_ids is None else check_ids("input_ids", input_ids, embedding)


class NSAPreTrainedModel(LlamaPreTrainedModel):
    """What models of `NSAModelConfig` share: loading, saving and initial weights."""

    config_class = NSAModelConfig
    config: NSAModelConfig
    _no_split_modules = ("NSADecoderLayer",)
    _can_record_outputs = {"hidden_states": NSADecoderLayer}  # noqa: RUF012

    def _check_and_adjust_attn_implementation(self, *args: Any, **kwargs: Any) -> str:
        return NAME  # whatever is asked for: `backend` in config.nsa chooses

    def _initialize_weights(self, module: nn.Module, *args: Any, **kwargs: Any) -> None:
        # `_init_weights` itself leaves loaded weights alone: not what is asked of code elsewhere
        super()._initialize_weights(module)

    def _init_weights(self, module: nn.Module) -> None:
        """Draw what no checkpoint has given: projections and embeddings with `initializer_range`,
        all else as `SparseAttention` begins."""
        super()._init_weights(module)
        if isinstance(module, Rotary):
            module.reset_parameters()
        if not isinstance(module, SparseAttention):
            return
        is_loaded = {p: getattr(p, "_is_hf_initialized", False) for p in module.parameters()}
        if all(is_loaded.values()):
            return
        values = {p: p.detach().clone() for p, loaded in is_loaded.items() if loaded}
        module.reset_parameters()
        with torch.no_grad():
            for parameter, value in values.items():
                parameter.copy_(value)
        for projection in filter(None, (module.to_qkv, module.combine_heads, module.to_index)):
            super()._init_weights(projection)


class NSAModel(NSAPreTrainedModel, LlamaModel):
    """Embedding, layers with a `SparseAttention` of the settings in `config.nsa`, and a norm."""

    def __init__(self, config: NSAModelConfig):
        check_type("config", config, NSAModelConfig, "an NSAModelConfig")
        config.check()
        super(LlamaModel, self).__init__(config)  # not a Llama's own attention
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, config.pad_token_id)
        self.layers = nn.ModuleList(
            NSADecoderLayer(config, index) for index in range(config.num_hidden_layers)
        )
        self.norm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.rotary_emb = no_positions
        self.gradient_checkpointing = False
        self.post_init()

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | NSAMask | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        **arguments: Any,
    ) -> BaseModelOutputWithPast:
        """As `LlamaModel.forward`. In training no cache is kept unless `use_cache` asks for it."""
        others = "cache", "past_key_values", "ranking", "return_dict", "shift_labels"
        check_keywords(arguments, [*TransformersKwargs.__annotations__, *others])
        cache = arguments.get("cache", arguments.get("past_key_values"))
        if not isinstance(cache, (Cache, type(None))):
            raise refusal("past_key_values", "a Cache of transformers or None", cache)
        if use_cache is None:
            use_cache = self.config.use_cache and not self.training and "ranking" not in arguments
        use_cache = check_bool("use_cache", use_cache)
        input_ids = check_inputs(input_ids, inputs_embeds, self.embed_tokens)
        is_mask = isinstance(attention_mask, (Tensor, NSAMask, type(None)))
        if not is_mask or getattr(attention_mask, "ndim", 1) == 0:
            raise refusal("attention_mask", "a tensor [B, S] or None", attention_mask)
        if position_ids is not None:
            check_shapes(position_ids=(position_ids, "B T"))
        x = input_ids if inputs_embeds is None else inputs_embeds
        has_cache = use_cache or cache
        if not has_cache and attention_mask is None and position_ids is None and x is not None:
            attention_mask = NSAMask(x.shape[1], has_positions=True)  # nothing is packed
        return super().forward(
            input_ids, attention_mask, position_ids, inputs_embeds=inputs_embeds,
            use_cache=use_cache, **arguments,
        )  # fmt: skip


class NSAForCausalLM(NSAPreTrainedModel, LlamaForCausalLM):
    """`NSAModel` with a head that predicts the next token."""

    _tp_plan = _pp_plan = _fsdp_plan = None

    def __init__(self, config: NSAModelConfig):
        super(LlamaForCausalLM, self).__init__(config)
        self.model = NSAModel(config)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | NSAMask | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        ranking_queries: int | Tensor | None = None,
        ranking_weights: str | None = None,
        **arguments: Any,
    ) -> NSACausalLMOutput:
        """As `LlamaForCausalLM.forward`, also with the loss of learned rankings.

        Args:
            labels: [B, T] ids, -100 for no loss. The logits of token t predict label t + 1, or with
                `shift_labels` [B, T] that of t.
            num_items_in_batch: predicted labels of all forwards of a step, of which this one gives
                its part of the mean loss; by default its own.
            ranking_queries, ranking_weights: with importance="index", as in `SparseAttention`: so
                many, or those at positions [m]; of the configuration in training with labels.

        Returns:
            logits [B, T, V], the cache, `ranking_loss`, and `loss`: the mean cross-entropy in nats,
            plus `ranking_loss`. Without labels `loss` is None, and 0 if none of them is predicted.
        """
        targets, weight = arguments.get("shift_labels"), None
        x: Any = input_ids if inputs_embeds is None else inputs_embeds
        if x is None or getattr(x, "ndim", 2) < 2:
            form = "exactly one of input_ids or inputs_embeds, of shape [b, n, ..]"
            raise ValueError(f"give {form}, got {describe(x)}")
        input_ids = check_inputs(input_ids, inputs_embeds, self.model.embed_tokens)
        if ranking_weights is not None:
            check_choice("ranking_weights", ranking_weights, WEIGHTS)
        if getattr(logits_to_keep, "ndim", 0) == 0:
            logits_to_keep = check_int("logits_to_keep", logits_to_keep, 0)
        for name, given in (("labels", labels), ("shift_labels", targets)):
            if given is not None:
                # any device: labels lie with the logits, which may be on another one than ids
                device: Any = getattr(given, "device", None)
                check_tensor(name, given, INTEGER_DTYPES, device, tuple(x.shape[:2]))
        labels = targets if labels is None else labels
        if labels is not None:
            if isinstance(logits_to_keep, Tensor) or logits_to_keep:
                raise refusal("logits_to_keep", "0 with labels", logits_to_keep)
            if targets is None:  # uint8 has no -100
                targets = F.pad(labels.long(), (0, 1), value=-100)[:, 1:]
            targets = arguments["shift_labels"] = targets.long().contiguous()
            ids = targets.masked_fill(targets == -100, 0)
            check_ids("labels other than -100", ids, self.model.embed_tokens)
            count, predicted = arguments.get("num_items_in_batch"), targets.ne(-100).sum()
            if count is not None and not isinstance(count, Tensor):
                count = check_int("num_items_in_batch", count, 0, 2**62)
            count = predicted if count is None else torch.as_tensor(count, device=labels.device)
            arguments["num_items_in_batch"] = count = count.masked_fill(count == 0, 1)
            weight = predicted / count
        if ranking_queries is None and self.training and labels is not None:
            ranking_queries = self.config.ranking_queries
        ranking, rule = None, self.config.nsa["importance"]
        if ranking_queries is not None:
            if rule != "index":
                raise ValueError(f"ranking_queries goes with importance='index', got {rule!r}")
            queries = sampled(ranking_queries, x.shape[1], None, x.device)
            weights = ranking_weights or self.config.ranking_weights
            ranking = arguments["ranking"] = Ranking(queries, weights)
        out = super().forward(
            input_ids=input_ids, attention_mask=attention_mask, position_ids=position_ids,
            inputs_embeds=inputs_embeds, labels=labels, use_cache=use_cache,
            logits_to_keep=logits_to_keep, return_dict=True, **arguments,
        )  # fmt: skip
        if ranking is None:
            return NSACausalLMOutput(**out)
        loss, ranking_loss = out.loss, ranking.loss
        if weight is not None:
            loss = loss + ranking_loss.to(loss.device) * weight.to(loss.device)
        return NSACausalLMOutput(**{**out, "loss": loss}, ranking_loss=ranking_loss)


# Trainer shifts labels of smoothing by the names of classes alone
MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.setdefault(NSAModelConfig.model_type, NSAForCausalLM.__name__)
AutoConfig.register(NSAModelConfig.model_type, NSAModelConfig, exist_ok=True)
AutoModel.register(NSAModelConfig, NSAModel, exist_ok=True)
AutoModelForCausalLM.register(NSAModelConfig, NSAForCausalLM, exist_ok=True)
