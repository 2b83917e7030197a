"""`distill`: the learned rankings of a model learn from its own attention."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from math import isfinite
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..checks.scalars import check_choice, check_factor, check_int, shown
from ..recipes import ranking_alone, sparse_layers
from .modeling import attention_modules, ranking_losses

STAGES = ("ranking", "all")


def distill(
    model: nn.Module,
    texts_or_ids: Tensor | Sequence[str],
    *,
    steps: int,
    lr: float,
    stage: str = "ranking",
    batch_size: int = 1,
    ranking_queries: int = 64,
    ranking_weights: str = "output",
    teacher: nn.Module | None = None,
    tokenizer: Any = None,
    length: int = 1024,
    generator: torch.Generator | None = None,
) -> list[dict[str, float]]:
    """Train a model of `SparseAttention` layers with AdamW, its rankings by the exact attention of
    sampled queries.

    Stage "ranking" trains `to_index` alone, while the layers are dense attention. Stage "all"
    trains all parameters that require gradients, with the selection: the loss is that of next
    tokens, or with a `teacher` the KL divergence from its predictions, plus that of the rankings.

    Args:
        model: of `convert(model, importance="index")`, or an `NSAForCausalLM` of that importance.
            It keeps its mode, training or inference.
        texts_or_ids: [N, T] token ids on any device, or texts, which need `tokenizer` and become
            rows of `length` tokens.
        steps, lr: steps of the optimizer, and its learning rate.
        batch_size: rows of a step, drawn anew for each step.
        ranking_queries, ranking_weights: queries of a step, and what a block is worth to them, as
            `SparseAttention.forward` describes.
        teacher: the model before its conversion, for stage "all": a copy, as `convert` changes the
            model itself.
        generator: of the draws of rows and of queries, on the CPU.

    Returns:
        Of each step a dict: "ranking", the loss of the rankings, a mean over layers; in stage "all"
        also "loss", that of the predictions.

    Raises:
        ValueError: a model without learned rankings, an argument out of range, rows that are too
            short for a block to be ranked, gradients that are off, a converted model under
            gradient checkpointing with `use_reentrant=True`, a teacher with layers of the model, or
            gradients that are not finite. Weights are then those of
            the step before.
    """
    counts = dict(steps=steps, batch_size=batch_size, ranking_queries=ranking_queries)
    for name, count in counts.items():
        check_int(name, count, 1)
    lr = check_factor("lr", lr)
    check_choice("stage", stage, STAGES)
    layers = [layer.attention for layer in attention_modules(model)]
    if teacher is not None and stage == "ranking":
        raise ValueError("teacher must be None in stage 'ranking', which learns from the model")
    if teacher is not None and {*layers} & {*teacher.modules()}:
        raise ValueError(
            "teacher must have layers of its own, got those of model, which convert and adapters "
            "change in place: copy.deepcopy(model) before"
        )
    rows = rows_of(texts_or_ids, tokenizer, length)
    configs = [layer.config for layer in layers]
    least = max(
        c.selection_block_size * (2 + c.num_initial_blocks + max(1, c.num_local_blocks))
        for c in configs
    )
    if rows.shape[1] < least:
        raise ValueError(
            f"texts_or_ids must have rows of {least} tokens, in which two blocks can be ranked, "
            f"got {rows.shape[1]}"
        )
    index = [p for layer in layers if layer.to_index for p in layer.to_index.parameters()]
    device, history = next(model.parameters()).device, []
    with trained_parameters(model, stage) as learned:
        optimizer = torch.optim.AdamW(learned, lr=lr, weight_decay=0.0)
        for step in range(steps):
            drawn = torch.randint(len(rows), (batch_size,), generator=generator)
            ids = rows[drawn.to(rows.device)].to(device)
            queries = drawn_queries(ids.shape[1], ranking_queries, generator).to(device)
            optimizer.zero_grad(set_to_none=True)
            with ranking_losses(model, queries, ranking_weights) as ranking:
                loss = predictions_loss(model, ids, stage, teacher)
                if any(p.requires_grad for p in index) and not ranking.loss.requires_grad:
                    raise ValueError(
                        "model must be called with gradients, and checkpointed without "
                        "use_reentrant=True, under which its rankings learn nothing: give "
                        "dict(use_reentrant=False) to gradient_checkpointing_enable"
                    )
                (ranking.loss if loss is None else loss + ranking.loss).backward()
            norm: Any = torch.nn.utils.clip_grad_norm_(learned, 1.0)
            norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm  # of FSDP2
            losses = {} if loss is None else {"loss": loss.item()}
            losses["ranking"] = ranking.loss.item()
            if not isfinite(norm.item()):
                optimizer.zero_grad(set_to_none=True)
                raise ValueError(
                    f"model must have finite gradients, got losses of {losses} in step {step}: "
                    "give a smaller lr, or a dtype of more range than float16"
                )
            optimizer.step()
            torch.clear_autocast_cache()  # casts of the weights before the step
            history.append(losses)
        optimizer.zero_grad(set_to_none=True)
    return history


def predictions_loss(
    model: Any, ids: Tensor, stage: str, teacher: nn.Module | None
) -> Tensor | None:
    """The forward of a step, and the loss of its predictions; none for the ranking alone."""
    if stage == "ranking":
        head = getattr(model, "get_output_embeddings", lambda: None)()
        if head is None:  # of no head, or of one that wants to know padding
            model.base_model(input_ids=ids, use_cache=False)
        else:  # FSDP2 gathers weights where the model itself is called
            model(input_ids=ids, use_cache=False, logits_to_keep=1)
        return None
    logits = model(input_ids=ids, use_cache=False).logits.float()
    if teacher is None:
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    with torch.no_grad():
        expected = teacher(input_ids=ids, use_cache=False).logits.float().log_softmax(dim=-1)
    log_probs, expected = logits.log_softmax(dim=-1).flatten(0, 1), expected.flatten(0, 1)
    return F.kl_div(log_probs, expected, reduction="batchmean", log_target=True)


@contextmanager
def trained_parameters(model: nn.Module, stage: str) -> Iterator[list[nn.Parameter]]:
    """The parameters that a stage trains. In stage "ranking" the layers are dense; they end as they
    were."""
    if stage == "all":
        yield [p for p in model.parameters() if p.requires_grad]
        return
    before = {layer: layer.dense for layer in sparse_layers(model)}
    try:
        for layer in before:
            layer.dense = True
        with ranking_alone(model) as learned:
            yield learned
    finally:
        for layer, dense in before.items():
            layer.dense = dense


def drawn_queries(n: int, count: int, generator: torch.Generator | None) -> Tensor:
    """Positions [m] of queries among n, in order: the same for all layers of a step."""
    return torch.randperm(n, generator=generator)[:count].sort().values


def rows_of(texts_or_ids: Any, tokenizer: Any, length: int) -> Tensor:
    """Token ids [N, T] of rows; texts, one after the other, become rows of `length`."""
    rows = texts_or_ids
    if isinstance(rows, (list, tuple)) and rows and all(isinstance(text, str) for text in rows):
        if tokenizer is None:
            raise ValueError("tokenizer must be given with texts, got None")
        tokens = [token for text in rows for token in tokenizer(text)["input_ids"]]
        if len(tokens) < check_int("length", length, 2):
            raise ValueError(f"texts_or_ids must have length={length} tokens, got {len(tokens)}")
        rows = torch.tensor(tokens[: len(tokens) // length * length]).view(-1, length)
    is_ids = isinstance(rows, Tensor) and rows.dtype in (torch.int32, torch.int64)
    if not is_ids or rows.ndim != 2 or not rows.numel():
        raise ValueError(
            f"texts_or_ids must be [N, T] integers or a list of texts, got {shown(rows)}"
        )
    return rows.long()
