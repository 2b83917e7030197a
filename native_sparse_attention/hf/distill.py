"""`distill`: the learned rankings of a model learn from its own attention."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from math import isfinite
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..checks.scalars import check_choice, check_factor, check_int, shown
from ..ranking import WEIGHTS
from ..recipes import ranking_alone, sparse_layers
from .modeling import Ranking, attention_modules, ranking_losses

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
            gradient checkpointing with `use_reentrant=True`, a teacher with layers of the model or
            with another vocabulary, or gradients that are not finite. Weights are then those of
            the step before.
    """
    steps, batch_size = check_int("steps", steps, 1), check_int("batch_size", batch_size, 1)
    ranking_queries = check_int("ranking_queries", ranking_queries, 1)
    rate = check_factor("lr", lr)
    check_choice("stage", stage, STAGES)
    check_choice("ranking_weights", ranking_weights, WEIGHTS)
    if generator is not None and (
        not isinstance(generator, torch.Generator) or generator.device.type != "cpu"
    ):
        raise ValueError(f"generator must be a torch.Generator on the CPU, got {shown(generator)}")
    if stage == "ranking" and teacher is not None:
        raise ValueError("teacher must be None in stage 'ranking', which learns from the model")
    attention_modules(model)
    if not hasattr(model, "get_input_embeddings"):
        raise ValueError(
            "model must be one of transformers: of a wrapper give what it wraps, as model.module, "
            f"got {type(model).__name__}"
        )
    if stage == "all" and head_of(model) is None:
        raise ValueError(
            f"model must predict tokens in stage 'all', got {type(model).__name__} without a head"
        )
    if teacher is not None:
        check_teacher(model, teacher)
    rows = rows_of(texts_or_ids, tokenizer, length)
    check_rows(model, rows)
    vocabulary: int = model.get_input_embeddings().num_embeddings  # type: ignore[operator]
    if rows.device.type == "cpu" and not 0 <= int(rows.min()) <= int(rows.max()) < vocabulary:
        raise ValueError(
            f"texts_or_ids must be token ids from 0 to {vocabulary - 1}, got {int(rows.min())} to "
            f"{int(rows.max())}"
        )
    device = next(model.parameters()).device
    history = []
    with ExitStack() as stack:
        learned = stack.enter_context(trained(model, stage))
        optimizer = torch.optim.AdamW(learned, lr=rate, weight_decay=0.0)
        for step in range(steps):
            drawn = torch.randint(len(rows), (batch_size,), generator=generator)
            ids = rows[drawn.to(rows.device)].to(device)
            queries = drawn_queries(ids.shape[1], ranking_queries, generator).to(device)
            optimizer.zero_grad(set_to_none=True)
            with ranking_losses(model, queries, ranking_weights) as ranking:
                loss = predictions_loss(model, ids, stage, teacher)
                check_learns(model, ranking)
                if loss is None:
                    ranking.loss.backward()
                else:
                    (loss + ranking.loss).backward()
            norm = torch.nn.utils.clip_grad_norm_(learned, 1.0)
            found = numbers(loss, ranking)
            if not isfinite(whole(norm).item()):
                optimizer.zero_grad(set_to_none=True)
                raise ValueError(
                    f"model must have finite gradients, got losses of {found} in step {step}: give "
                    "a smaller lr, or a dtype of more range than float16"
                )
            optimizer.step()
            torch.clear_autocast_cache()  # casts of the weights before the step
            history.append(found)
        optimizer.zero_grad(set_to_none=True)
    return history


def head_of(model: Any) -> nn.Module | None:
    head: nn.Module | None = getattr(model, "get_output_embeddings", lambda: None)()
    return head


def whole(t: Any) -> Tensor:
    """A tensor that FSDP2 or tensor parallelism may have split."""
    found: Tensor = t.full_tensor() if hasattr(t, "full_tensor") else t
    return found


def check_teacher(model: nn.Module, teacher: Any) -> None:
    """Check that a teacher predicts the model's tokens, and not by the model's own layers.

    Raises:
        ValueError: it does not.
    """
    if not isinstance(teacher, nn.Module):
        raise ValueError(f"teacher must be a module or None, got {shown(teacher)}")
    own = {id(layer) for layer in attention_modules(model)}
    if any(id(module) in own for module in teacher.modules()):
        raise ValueError(
            "teacher must have layers of its own, got those of model, which convert and adapters "
            "change in place: copy.deepcopy(model) before"
        )
    if not hasattr(teacher, "get_output_embeddings"):
        return
    heads = head_of(model), head_of(teacher)
    if heads[1] is None:
        raise ValueError(
            f"teacher must predict tokens, got {type(teacher).__name__} without a head"
        )
    words = [getattr(head, "out_features", None) for head in heads]
    if words[0] != words[1]:
        raise ValueError(f"teacher must have the model's {words[0]} tokens, got {words[1]}")


def check_learns(model: nn.Module, ranking: Ranking) -> None:
    """Check that the loss of a forward has gradients for the rankings. Checkpointing of the older
    kind runs the layers without, and keeps only what they return.

    Raises:
        ValueError: it has none.
    """
    indices = (layer.attention.to_index for layer in attention_modules(model))
    learn = any(p.requires_grad for to in indices if to is not None for p in to.parameters())
    if learn and not ranking.loss.requires_grad:
        raise ValueError(
            "model must be called with gradients, and checkpointed without use_reentrant=True, "
            "under which its rankings learn nothing: give dict(use_reentrant=False) to "
            "gradient_checkpointing_enable"
        )


def predictions_loss(
    model: Any, ids: Tensor, stage: str, teacher: nn.Module | None
) -> Tensor | None:
    """The forward of a step, and the loss of its predictions; none for the ranking alone."""
    if stage == "ranking":
        if head_of(model) is None:  # of no head, or of one that wants to know padding
            model.base_model(input_ids=ids, use_cache=False)
        else:  # FSDP2 gathers weights where the model itself is called
            model(input_ids=ids, use_cache=False, logits_to_keep=1)
        return None
    logits = model(input_ids=ids, use_cache=False).logits.float()
    if teacher is None:
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    with torch.no_grad():
        expected = teacher(input_ids=ids, use_cache=False).logits.float().log_softmax(dim=-1)
    given, expected = logits.log_softmax(dim=-1).flatten(0, 1), expected.flatten(0, 1)
    return F.kl_div(given, expected, reduction="batchmean", log_target=True)


def numbers(loss: Tensor | None, ranking: Ranking) -> dict[str, float]:
    """The losses of a step as plain numbers."""
    found = {} if loss is None else {"loss": loss.item()}
    return found | {"ranking": ranking.loss.item()}


@contextmanager
def trained(model: nn.Module, stage: str) -> Iterator[list[nn.Parameter]]:
    """The parameters that a stage trains. In stage "ranking" the layers are dense; both end as they
    were.

    Raises:
        ValueError: no parameters to train, or layers that cannot be dense.
    """
    if stage == "all":
        learned = [p for p in model.parameters() if p.requires_grad]
        if not learned:
            raise ValueError("model must have parameters that require gradients, got none")
        yield learned
        return
    layers = sparse_layers(model)
    before = [layer.dense for layer in layers]
    try:
        for layer in layers:
            layer.dense = True
        with ranking_alone(model) as learned:
            yield learned
    finally:
        for layer, dense in zip(layers, before, strict=True):
            layer.dense = dense


def drawn_queries(n: int, count: int, generator: torch.Generator | None) -> Tensor:
    """Positions [m] of queries among n, in order: the same for all layers of a step."""
    return torch.randperm(n, generator=generator)[:count].sort().values


def rows_of(texts_or_ids: Any, tokenizer: Any, length: int) -> Tensor:
    """Token ids [N, T]: those given, or of texts, one after the other, in rows of `length`.

    Raises:
        ValueError: neither, texts without a tokenizer, or fewer tokens than a row.
    """
    if isinstance(texts_or_ids, Tensor):
        ids = texts_or_ids
        if ids.ndim != 2 or ids.dtype not in (torch.int32, torch.int64) or not ids.numel():
            raise ValueError(f"texts_or_ids must be [N, T] integers or texts, got {shown(ids)}")
        return ids.long()
    texts = texts_or_ids if isinstance(texts_or_ids, (list, tuple)) else []
    if not texts or not all(isinstance(text, str) for text in texts):
        raise ValueError(
            f"texts_or_ids must be [N, T] integers or a list of texts, got {shown(texts_or_ids)}"
        )
    if tokenizer is None:
        raise ValueError("tokenizer must be given with texts, got None")
    length = check_int("length", length, 2)
    found = [token for text in texts for token in tokenizer(text)["input_ids"]]
    if len(found) < length:
        raise ValueError(f"texts_or_ids must have length={length} tokens, got {len(found)}")
    rows = len(found) // length
    return torch.tensor(found[: rows * length]).view(rows, length)


def check_rows(model: nn.Module, rows: Tensor) -> None:
    """Check that the last query of a row has two blocks to rank."""
    layers = [layer.attention for layer in attention_modules(model)]
    least = max(
        (2 + a.num_initial_blocks + max(1, a.num_local_blocks)) * a.selection_block_size
        for a in layers
    )
    if rows.shape[1] < least:
        raise ValueError(
            f"texts_or_ids must have rows of {least} tokens, in which two blocks can be ranked, "
            f"got {rows.shape[1]}"
        )
