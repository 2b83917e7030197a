"""Soft caps of the logits and attention sinks: what the table does not hold."""

import pytest
import torch

from native_sparse_attention import (
    KVCache,
    select_blocks,
    sliding_window_attention,
)
from tests.helpers.calls import RANKING, draw
from tests.helpers.layers import DIM, layer


def test_ranking_by_probabilities():
    """As branch 1 attends; the ranking by logits knows of neither."""
    tensors = draw("compressed", place=(45, 45)).tensors
    tensors = {n: 1.5 * tensors[n].cpu() for n in ("q", "ck", "mem_k")}
    call = dict(RANKING, backend="eager")
    sinks = torch.randn(tensors["q"].shape[2]) * 5
    for changed in (dict(soft_cap=0.3), dict(sinks=sinks)):
        plain = select_blocks(**tensors, **call, importance="probs")
        other = select_blocks(**tensors, **call, importance="probs", **changed)
        assert (plain != other).any()
        plain = select_blocks(**tensors, **call)
        assert torch.equal(plain, select_blocks(**tensors, **call, **changed))


def test_module():
    """Cached decoding is the parallel form; sinks are weights, and learn."""
    module = layer(soft_cap=2.0, attention_sinks=True, importance="probs")
    assert module.sinks.shape == (3, 4) and "soft_cap=2.0" in repr(module)
    x = torch.randn(2, 33, DIM, dtype=torch.float64)
    expected = module(x)
    cache = KVCache()
    outs = [module(t, cache=cache) for t in x.split([20, 1, 1, 11], 1)]
    torch.testing.assert_close(torch.cat(outs, 1), expected)
    expected.sum().backward()
    assert (module.sinks.grad != 0).all()
    plain = layer()
    assert "sinks" not in plain.state_dict() and plain.sinks is None


@pytest.mark.parametrize(
    "kwargs, message",
    [
        (dict(soft_cap=0.0), "soft_cap must be"),
        (dict(soft_cap=-1.0), "soft_cap must be"),
        (dict(soft_cap=float("nan")), "soft_cap must be"),
        (dict(sinks=torch.zeros(3)), r"sinks must be floating of shape \[4\]"),
        (dict(sinks=torch.zeros(4, dtype=torch.long)), "sinks must be floating"),
    ],
)
def test_bad_input(kwargs, message):
    tensors = draw("window", heads=(4, 2, 16, 16)).tensors
    with pytest.raises(ValueError, match=message):
        sliding_window_attention(**tensors, sliding_window_size=2, **kwargs)
