"""Training recipes: dense layers, and steps of the ranking alone. docs/training.md uses them.

A learned ranking (`importance="index"`) begins to be useful once it has learned from attention that
already works.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from .attention import SparseAttention, find_sparse_layers


def sparse_layers(model: nn.Module) -> list[SparseAttention]:
    """The layers of a model that can be dense: those of `branches=("selected",)`, in its order."""
    expected = " with branches=('selected',)"
    layers = find_sparse_layers(model, expected, lambda m: m.config.branches == ("selected",))
    return [*layers.values()]


def set_dense(model: nn.Module, dense: bool) -> None:
    """Let queries of `sparse_layers` attend to all keys that they may see or to their selection."""
    for layer in sparse_layers(model):
        layer.dense = dense


@contextmanager
def ranking_alone(model: nn.Module) -> Iterator[list[nn.Parameter]]:
    """Only the weights of learned rankings (`to_index`) are trained; yields them. At the end all
    parameters are trained that were before.

    The loss is the second result of a forward with `ranking_queries`. With dense layers it learns
    from the attention that the model has without a selection.
    """
    expected = " that rank by importance='index'"
    layers = find_sparse_layers(model, expected, lambda layer: layer.to_index).values()
    were_trained = {parameter: parameter.requires_grad for parameter in model.parameters()}
    try:
        model.requires_grad_(False)
        for layer in layers:
            layer.to_index.requires_grad_(True)
        yield [p for layer in layers for p in layer.to_index.parameters()]
    finally:
        for parameter, was_trained in were_trained.items():
            parameter.requires_grad_(was_trained)
