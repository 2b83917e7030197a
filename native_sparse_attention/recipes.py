"""Training recipes: dense steps, and steps of the ranking alone.

A model that is dense in its first steps, or in some steps by chance, learns attention over long
distances before, or while, it learns with the blocks that its ranking chooses. A learned ranking
(`importance="index"`) begins to be useful once it has learned from attention that already works.
By docs/training.md dense steps gain nothing where blocks are ranked by the greatest logit.

    schedule = DenseSteps(first=1000)
    for step in range(1, steps + 1):
        set_dense(model, schedule.is_dense(step))
        loss, ranking_loss = model(ids, return_loss=True, ranking_queries=64)
        (loss + ranking_loss).backward()
        ...

    with ranking_alone(model):  # the model is as it was, its ranking learns
        ...
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from torch import nn

from .attention import SparseAttention
from .checks.networks import check_model
from .checks.scalars import check_bools, check_int, check_probability, shown


def sparse_layers(model: nn.Module) -> list[SparseAttention]:
    """The layers of a model that can be dense: those of `branches=("selected",)`, in its order.

    Raises:
        ValueError: there are none.
    """
    check_model(model)
    found = [
        module
        for module in model.modules()
        if isinstance(module, SparseAttention) and module.branches == ("selected",)
    ]
    if not found:
        raise ValueError(
            "model must have a SparseAttention layer with branches=('selected',), got none in a "
            f"{type(model).__name__}"
        )
    return found


def set_dense(model: nn.Module, dense: bool, keep: tuple[int, ...] = ()) -> None:
    """Make the layers of `sparse_layers` dense, or sparse but for the layers `keep`.

    Args:
        model: any module.
        dense: whether queries attend to all keys that they may see.
        keep: indices of layers that are dense in any case; -1 is the last.

    Raises:
        ValueError: a model without such layers, or an index of no layer.
    """
    layers = sparse_layers(model)
    (dense,) = check_bools(dense=dense)
    if not isinstance(keep, (tuple, list, range)):
        raise ValueError(f"keep must be a tuple of indices of layers, got {shown(keep)}")
    count = len(layers)
    always = {check_int("keep", index, -count, below=count) % count for index in keep}
    for index, layer in enumerate(layers):
        wanted = dense or index in always
        if layer.dense != wanted:
            layer.dense = wanted


@dataclass(frozen=True, kw_only=True)
class DenseSteps:
    """Which steps of a training are dense. Step 1, 2, ... is a function of these numbers, so that a
    resumed run goes on in the same way.

    Args:
        first: dense steps at the beginning.
        share: probability that a later step is dense.
        seed: of that chance.

    Raises:
        ValueError: a negative number of steps, or a probability outside of 0 to 1.
    """

    first: int = 0
    share: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        check_int("first", self.first, 0)
        check_int("seed", self.seed, 0)
        check_probability("share", self.share)

    def is_dense(self, step: int) -> bool:
        if step <= self.first:
            return True
        return random.Random(f"{self.seed} {step}").random() < self.share


@contextmanager
def ranking_alone(model: nn.Module) -> Iterator[list[nn.Parameter]]:
    """Only the weights of learned rankings (`to_index`) are trained; yields them. At the end all
    parameters are trained that were before.

    The loss is the second result of a forward with `ranking_queries`. With dense layers it learns
    from the attention that the model has without a selection.

    Raises:
        ValueError: no layer has `importance="index"`.
    """
    check_model(model)
    layers = [m for m in model.modules() if isinstance(m, SparseAttention) and m.to_index]
    learned = [p for layer in layers for p in layer.to_index.parameters()]
    if not learned:
        raise ValueError(
            "model must have SparseAttention layers that rank by importance='index', got none in a "
            f"{type(model).__name__}"
        )
    before = {parameter: parameter.requires_grad for parameter in model.parameters()}
    try:
        for parameter in before:
            parameter.requires_grad_(False)
        for parameter in learned:
            parameter.requires_grad_(True)
        yield learned
    finally:
        for parameter, trained in before.items():
            parameter.requires_grad_(trained)
