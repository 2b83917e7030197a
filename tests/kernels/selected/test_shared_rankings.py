"""Tokens that share a ranking, on a Hopper: right on a GPU, however many are one entry."""

import pytest
import torch

from benchmarks.problem import pooled
from tests.helpers.budget import DEVICE, draw
from tests.helpers.on_hopper import MARKS, layer

pytest.importorskip("triton")

from native_sparse_attention.kernels.selected import key_major_sm90

pytestmark = MARKS


@pytest.mark.parametrize(
    "heads, D, stride, T, S, causal, tokens",
    [
        ((32, 2), 128, 4, 640, 640, True, 4), ((32, 2), 64, 16, 640, 640, True, 4),
        ((8, 2), 128, 16, 640, 704, True, 16), ((6, 2), 64, 16, 640, 640, True, 16),
        ((4, 4), 128, 16, 640, 640, True, 16), ((16, 2), 128, 2, 640, 704, True, 2),
        ((24, 2), 64, 8, 640, 640, True, 4), ((64, 1), 128, 4, 320, 320, True, 1),
        ((8, 2), 128, 16, 650, 704, False, 2), ((4, 4), 64, 16, 650, 704, False, 1),
    ],
)  # fmt: skip
def test_tokens_that_share_a_ranking(monkeypatch, heads, D, stride, T, S, causal, tokens):
    """Neighbours are one entry of the blocks that they chose."""
    run, taken = key_major_sm90.backward, []
    monkeypatch.setattr(key_major_sm90, "backward", lambda *a: (taken.append(a[-1]), run(*a)))
    settings = {
        "compress_block_size": 32, "compress_block_sliding_stride": 16, "selection_block_size": 64,
        "num_selected_blocks": 5, "num_initial_blocks": 1, "num_local_blocks": 2,
        "sliding_window_size": 255, "selection_stride": stride, "causal": causal,
    }  # fmt: skip
    settings |= {} if causal else {"q_offset": 0}
    q, k, v = draw(T, S, *heads, D, D, torch.bfloat16)
    ck, cv = (pooled(t, 32, 16) for t in (k, v))
    gates = torch.rand(2, T, heads[0], 3, device=DEVICE).to(torch.bfloat16)
    tensors = [t.requires_grad_() for t in (q, k, v, ck, cv, gates)]
    d_out = torch.randn_like(q)
    plain = layer(tensors, d_out, {"flash_sm90": False, "key_major_sm90": False}, **settings)
    assert taken == []
    found = layer(tensors, d_out, {"flash_sm90": True}, **settings)
    assert taken == [tokens]
    for one, other in zip(found, plain, strict=True):
        error = (one.float() - other.float()).norm() / other.float().norm()
        assert error <= torch.finfo(torch.bfloat16).eps
    again = layer(tensors, d_out, {"flash_sm90": True}, **settings)
    assert all(torch.equal(a, b) for a, b in zip(found, again, strict=True))
