"""Training recipes: dense layers, and steps of the ranking alone.

A learned ranking (`importance="index"`) begins to be useful once it has learned from attention that
already works.

    set_dense(model, True)
    with ranking_alone(model) as parameters:  # the model is as it was, its ranking learns
        _, ranking_loss = model(ids, return_loss=True, ranking_queries=64)
        ranking_loss.backward()
        ...
    set_dense(model, False)
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from .attention import SparseAttention
from .checks import check_model


def _find_layers(model: nn.Module, expected: str, fits: Any) -> list[SparseAttention]:
    check_model(model)
    layers = [m for m in model.modules() if isinstance(m, SparseAttention) and fits(m)]
    if not layers:
        kind = type(model).__name__
        raise ValueError(f"model must have SparseAttention layers {expected}, got none in a {kind}")
    return layers


def sparse_layers(model: nn.Module) -> list[SparseAttention]:
    """The layers of a model that can be dense: those of `branches=("selected",)`, in its order.

    Raises:
        ValueError: there are none.
    """
    expected = "with branches=('selected',)"
    return _find_layers(model, expected, lambda layer: layer.config.branches == ("selected",))


def set_dense(model: nn.Module, dense: bool) -> None:
    """Let queries of `sparse_layers` attend to all keys that they may see, or to their selection.

    Raises:
        ValueError: a model without such layers.
    """
    for layer in sparse_layers(model):
        layer.dense = dense


@contextmanager
def ranking_alone(model: nn.Module) -> Iterator[list[nn.Parameter]]:
    """Only the weights of learned rankings (`to_index`) are trained; yields them. At the end all
    parameters are trained that were before.

    The loss is the second result of a forward with `ranking_queries`. With dense layers it learns
    from the attention that the model has without a selection.

    Raises:
        ValueError: no layer has `importance="index"`.
    """
    layers = _find_layers(model, "that rank by importance='index'", lambda layer: layer.to_index)
    were_trained = {parameter: parameter.requires_grad for parameter in model.parameters()}
    try:
        model.requires_grad_(False)
        for layer in layers:
            layer.to_index.requires_grad_(True)
        yield [p for layer in layers for p in layer.to_index.parameters()]
    finally:
        for parameter, was_trained in were_trained.items():
            parameter.requires_grad_(was_trained)
