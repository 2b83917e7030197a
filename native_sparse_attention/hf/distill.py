"""`distill`: the learned rankings of a model learn from its own attention."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..attention import find_sparse_layers
from ..checks import (
    check_choice,
    check_factor,
    check_generator,
    check_ids,
    check_ints,
    check_type,
    refusal,
)
from ..ranking import WEIGHTS
from ..recipes import ranking_alone
from .modeling import ranking_losses


def distill(
    model: nn.Module,
    ids: Tensor,
    *,
    steps: int,
    lr: float,
    stage: str = "ranking",
    batch_size: int = 1,
    ranking_queries: int = 64,
    ranking_weights: str = "output",
    teacher: nn.Module | None = None,
    generator: torch.Generator | None = None,
) -> list[dict[str, float]]:
    """Train a model with AdamW, its rankings by the exact attention of sampled queries.

    Stage "ranking" trains `to_index` alone, while the layers are dense attention. Stage "all"
    trains all parameters that require gradients, with the selection: the loss is that of next
    tokens, or with a `teacher` the KL divergence from its predictions, plus that of the rankings.

    Args:
        model: of `convert(model, importance="index")`, or an `NSAForCausalLM` of that importance.
            It keeps its mode, training or inference.
        ids: [N, T] token ids, on any device. Each step draws `batch_size` rows anew.
        steps, lr: steps of the optimizer, and its learning rate.
        ranking_queries, ranking_weights: as in `SparseAttention.forward`, of each step.
        teacher: a copy of the model before its conversion, for stage "all".
        generator: of the draws of rows and of queries, on the CPU.

    Returns:
        Of each step a dict: "ranking", the loss of the rankings, a mean over layers; in stage "all"
        also "loss", that of the predictions.

    Raises:
        ValueError: a model without learned rankings, an argument out of range, rows too short for
            a block to be ranked, gradient checkpointing with `use_reentrant=True`, a teacher with
            layers of the model, or gradients that are not finite, by which no weight changes.
    """
    check_ints(1, steps=steps, batch_size=batch_size, ranking_queries=ranking_queries)
    lr = check_factor("lr", lr)
    check_choice("stage", stage, ("ranking", "all"))
    check_choice("ranking_weights", ranking_weights, WEIGHTS)
    layers = [*find_sparse_layers(model, " that rank by importance='index'").values()]
    check_generator(generator)
    check_type("teacher", teacher, nn.Module, "an nn.Module", or_none=True)
    embedding: Any = getattr(model, "get_input_embeddings", lambda: nn.Identity())()
    ids = check_ids("ids", ids, embedding)
    is_alone, configs = stage == "ranking", [layer.config for layer in layers]
    blocks = [c.num_initial_blocks + max(1, c.num_local_blocks) + 2 for c in configs]
    minimum = max(n * c.selection_block_size for n, c in zip(blocks, configs, strict=True))
    if ids.shape[1] < minimum or not len(ids):
        expected = f"rows of {minimum} tokens, in which two blocks can be ranked"
        raise ValueError(f"ids must have {expected}, got {list(ids.shape)}")
    if teacher is not None and (is_alone or {*layers} & {*teacher.modules()}):
        expected = "None in stage 'ranking', and in stage 'all' have layers of its own"
        raise ValueError(f"teacher must be {expected}, got a {type(teacher).__name__}")
    dense, history = {layer: layer.dense for layer in layers}, []
    device = next(model.parameters()).device
    trained = [p for p in model.parameters() if p.requires_grad]
    if not (is_alone or trained):
        raise refusal("model", "one with weights that require gradients in stage 'all'", got="none")
    try:
        with ranking_alone(model) if is_alone else nullcontext(trained) as learned:
            for layer in layers:
                layer.dense = layer.config.branches == ("selected",) if is_alone else layer.dense
            optimizer = torch.optim.AdamW(learned, lr=lr, weight_decay=0.0)
            for step in range(steps):
                drawn = torch.randint(len(ids), (batch_size,), generator=generator)
                rows = ids[drawn.to(ids.device)].to(device, torch.long)
                # the same positions for all layers
                queries = torch.randperm(ids.shape[1], generator=generator)[:ranking_queries]
                optimizer.zero_grad(set_to_none=True)
                losses: dict[str, Any] = {}
                with ranking_losses(model, queries.sort().values, ranking_weights) as ranking:
                    if not is_alone:
                        losses["loss"] = predictions_loss(model, rows, teacher)
                    elif getattr(model, "get_output_embeddings", lambda: None)() is None:
                        # of no head, or of one that wants to know padding
                        base: Any = getattr(model, "base_model", model)  # a wrapper has none
                        base(input_ids=rows, use_cache=False)
                    else:  # FSDP2 gathers weights where the model itself is called
                        model(input_ids=rows, use_cache=False, logits_to_keep=1)
                    losses["ranking"] = ranking.loss
                    sum(losses.values()).backward()
                norm: Any = torch.nn.utils.clip_grad_norm_(learned, 1.0)
                norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm  # of FSDP2
                history.append({name: loss.item() for name, loss in losses.items()})
                if not norm.isfinite():
                    raise ValueError(
                        f"model must have finite gradients, got losses of {history[-1]} in step "
                        f"{step}: give a smaller lr, or a dtype of more range than float16"
                    )
                optimizer.step()
                torch.clear_autocast_cache()  # casts of the weights before the step
    finally:
        model.zero_grad(set_to_none=True)
        for layer, is_dense in dense.items():
            layer.dense = is_dense
    return history


def predictions_loss(model: Any, ids: Tensor, teacher: Any) -> Tensor:
    """The loss of next tokens, or from the predictions of a teacher."""
    logits = logits_of("model", model, ids)
    if teacher is None:
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    with torch.no_grad():
        expected = logits_of("teacher", teacher, ids, logits.shape[-1]).log_softmax(dim=-1)
    log_probs, expected = logits.log_softmax(dim=-1).flatten(0, 1), expected.flatten(0, 1)
    return F.kl_div(log_probs, expected, reduction="batchmean", log_target=True)


def logits_of(name: str, model: Any, ids: Tensor, size: int | None = None) -> Tensor:
    """The logits [B, T, V] of a model in fp32, V as large as that of the other model."""
    logits = getattr(model(input_ids=ids, use_cache=False), "logits", None)
    if logits is None or logits.shape != (*ids.shape, size or logits.shape[-1]):
        raise refusal(name, f"one with {size or 'V'} logits for each token in stage 'all'", model)
    return logits.float()
