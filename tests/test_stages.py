"""Rankings in two stages (`num_selected_groups`): groups of blocks by windows, blocks by tokens.
Layers that rank so: test_block_indices.py."""

import pytest
import torch

from native_sparse_attention import NSAConfig, nsa_cost, select_blocks
from tests.helpers.budget import DEVICE, running
from tests.helpers.sizes import sizes

kernels = pytest.mark.kernels
BACKENDS = ["eager", pytest.param("triton", marks=[kernels, pytest.mark.slow(one_of=3)])]
SIZES = sizes(4, 4, 8, n=3, num_initial_blocks=1, num_local_blocks=4)


def draw(T, S, H, K, D, d=4, dtype=torch.float32):
    q, k = (torch.randn(2, n, h, D, device=DEVICE).to(dtype) for n, h in ((T, H), (S, K)))
    ck = k[:, : S // d * d].unflatten(1, (-1, d)).mean(dim=2)
    return q, k, ck


def by_hand(q, k, ck, i, n1, importance):
    """The blocks of the query in row i of q [t h d], heads of one KV head, at position 96 + i."""
    q = q if importance == "head_max" else q.mean(1, keepdim=True)
    score, q, i = ck @ q[i // 32 * 32].T, q[i].T, 96 + i
    groups = [g for g in range(len(ck) // 8) if g <= i // 32 - 1]
    reduce = torch.mean if importance == "logits" else torch.amax
    best = sorted(groups, key=lambda g: -float(reduce(score[8 * g : 8 * g + 8])))[:n1]
    blocks = [c for g in best for c in range(4 * g, 4 * g + 4) if 1 <= c <= i // 8 - 4]
    best = sorted(blocks, key=lambda c: -float((k[8 * c : 8 * c + 8] @ q).max()))[:3]
    return best + [-1] * (3 - len(best))


@pytest.mark.parametrize("importance", ["max", "head_max", "logits"])
@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("backend", BACKENDS)
def test_the_definition(backend, shared, importance):
    q, k, ck = draw(70, 166, 4, 2, 16)
    n1 = 8 if importance == "logits" else 2  # more than there are
    call = dict(SIZES, importance=importance, query_heads_share_selected_kv=shared, k=k)
    found = select_blocks(q, ck, **call, num_selected_groups=n1, backend=backend)
    for b, t, r in ((0, 69, 0), (1, 0, 1), (0, 31, 1), (1, 50, -1)):
        heads, kv = (q.unflatten(2, (2, 2)), r) if shared else (q[:, :, :, None], r // 2)
        expected = by_hand(heads[b, :, r], k[b, :, kv], ck[b, :, kv], t, n1, importance)
        assert found[b, t, r].tolist() == expected


@pytest.mark.gpu
@pytest.mark.parametrize("form", ["sm90", "portable"])
@pytest.mark.parametrize("D, s, n1", [(128, 64, 5), (64, 32, 16), (128, 128, 2)])
@pytest.mark.parametrize("importance", ["max", "head_max"])
def test_tiles_that_share_groups(importance, form, D, s, n1):
    """Kernels of half precision rank as the specification does, but for near-ties."""
    S = 40 * s
    for T, H, K in ((S, 8, 4), (S // 2, 2, 2)):
        q, k, ck = draw(T, S, H, K, D, 16, torch.bfloat16)
        call = SIZES | sizes(16, 16, s, n=7, num_selected_groups=n1, importance=importance, k=k)
        with running(form) as backend:
            found = select_blocks(q, ck, **call, backend=backend)
            assert torch.equal(found, select_blocks(q, ck, **call, backend=backend))
        expected = select_blocks(q, ck, **call, backend="eager")
        assert torch.equal(found < 0, expected < 0)
        sets = (t.sort(dim=-1).values for t in (found, expected))
        assert torch.eq(*sets).float().mean() > 0.98


def test_cost():
    def cost(**changes):
        sizes = dict(SIZES, dim=32, dim_head=16, heads=4, kv_heads=2, causal=True, dense_length=0)
        return nsa_cost(NSAConfig.preset("one-softmax", None, **sizes | changes), 4096).sparse

    few, many = (cost(num_selected_groups=n) for n in (2, 40))
    every = cost(compress_block_size=1, compress_block_sliding_stride=1)
    assert few.attention_flops < many.attention_flops < every.attention_flops
    assert few.step_bytes < many.step_bytes < every.step_bytes
