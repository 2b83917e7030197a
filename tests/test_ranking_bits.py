"""Rankings by 8-bit integers (`ranking_bits=8`), to the bit the same of every backend.
Layers that rank so: test_block_indices.py."""

import pytest
import torch

from native_sparse_attention import select_blocks
from tests.helpers.budget import DEVICE

BACKENDS = ["eager", pytest.param("triton", marks=pytest.mark.kernels)]
# Triton's interpreter has no bfloat16
DTYPES = [torch.float16, torch.float32]
SIZES = dict(
    compress_block_size=2, compress_block_sliding_stride=2, selection_block_size=8,
    num_selected_blocks=3, num_initial_blocks=1, num_local_blocks=0,
)  # fmt: skip


def integers(x):
    size = x.abs().max().clamp(min=1e-30) * (1 / 127)
    return (x / size).round().to(torch.int64), size


def by_hand(q, ck, i):
    """The blocks of query i, of the summed queries [d] and windows [w d] of its KV head."""
    query, scores = integers(q)[0], {}
    for c in range(1, i // 8):
        keys, size = integers(ck[4 * c : 4 * c + 4])
        scores[c] = (keys @ query).max().to(torch.float32) * size
    best = sorted(scores, key=lambda c: (-float(scores[c]), c))[:3]
    return best + [-1] * (3 - len(best))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_the_definition(backend, dtype):
    """Of keys with large channels, in a sequence whose last block is partial."""
    q, ck = torch.randn(2, 20, 4, 16, device=DEVICE), torch.randn(2, 65, 2, 16, device=DEVICE)
    ck[..., 3] += 4
    ck[:, 12:16] = 0  # and a block of zeros
    q, ck = q.to(dtype), ck.to(dtype)
    call = dict(SIZES, importance="max", ranking_bits=8, q_offset=110, seq_len=130)
    found = select_blocks(q, ck, **call, backend=backend)
    for b, t, h in ((0, 19, 0), (1, 0, 1), (0, 7, 1), (1, 13, 0)):
        group = q[b, t, 2 * h : 2 * h + 2].float().sum(0)
        expected = by_hand(group.cpu(), ck[b, :, h].float().cpu(), 110 + t)
        assert found[b, t, h].tolist() == expected
    assert not torch.equal(found, select_blocks(q, ck, **call | dict(ranking_bits=16)))


@pytest.mark.kernels
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "heads, d, s, settings",
    [
        ((4, 4, 32), 1, 32, dict(selection_stride=4)),
        ((6, 2, 24), 4, 16, dict(query_heads_share_selected_kv=False, scale=-0.3)),
        ((3, 1, 16), 8, 4, dict(num_local_blocks=2)),
    ],
)
def test_kernels(heads, d, s, settings, dtype):
    (H, K, D), S = heads, 150
    q = torch.randn(2, 30, H, D, device=DEVICE).to(dtype)
    ck = torch.randn(2, S // d, K, D, device=DEVICE).to(dtype)
    call = dict(SIZES, compress_block_size=d, compress_block_sliding_stride=d)
    call |= dict(selection_block_size=s, importance="max", ranking_bits=8, seq_len=S, q_offset=120)
    call |= settings
    right = select_blocks(q, ck, **call, backend="eager")
    assert torch.equal(select_blocks(q, ck, **call, backend="triton"), right)
    assert (right >= 0).any()
