"""Rankings in two stages (`num_selected_groups`): groups of blocks by windows, blocks by tokens."""

import pytest
import torch

import native_sparse_attention as nsa
from native_sparse_attention import NSAConfig, SparseAttention, select_blocks
from native_sparse_attention.cost import nsa_cost
from tests.helpers.budget import DEVICE, running

kernels = pytest.mark.kernels
BACKENDS = ["eager", pytest.param("triton", marks=kernels)]
SIZES = dict(
    compress_block_size=4, compress_block_sliding_stride=4, selection_block_size=8,
    num_selected_blocks=3, num_initial_blocks=1, num_local_blocks=4,
)  # fmt: skip


def draw(T, S, H, K, D, d=4, dtype=torch.float32):
    q, k = (torch.randn(2, n, h, D, device=DEVICE).to(dtype) for n, h in ((T, H), (S, K)))
    ck = k[:, : S // d * d].unflatten(1, (-1, d)).mean(dim=2)
    return q, k, ck


def by_hand(q, k, ck, i, h, n1, importance):
    """The blocks of a query at position i with head h of its own, from the definition."""
    score = ck[:, h] @ q
    groups = [g for g in range(len(ck) // 8) if g <= i // 32 - 1]
    reduce = torch.mean if importance == "logits" else torch.amax
    best = sorted(groups, key=lambda g: -float(reduce(score[8 * g : 8 * g + 8])))[:n1]
    blocks = [c for g in best for c in range(4 * g, 4 * g + 4) if 1 <= c <= i // 8 - 4]
    best = sorted(blocks, key=lambda c: -float((k[8 * c : 8 * c + 8, h] @ q).max()))[:3]
    return best + [-1] * (3 - len(best))


@pytest.mark.parametrize("importance", ["max", "logits"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_the_definition(backend, importance):
    q, k, ck = draw(40, 150, 4, 2, 16)
    q = q[:, :, :1].expand(-1, -1, 4, -1)  # the mean of equal queries
    call = dict(SIZES, importance=importance, k=k, num_selected_groups=2, backend=backend)
    found = select_blocks(q, ck, **call)
    for b, t, h in ((0, 39, 0), (1, 0, 1), (0, 17, 1)):
        expected = by_hand(q[b, t, h], k[b], ck[b], 110 + t, h, 2, importance)
        assert found[b, t, h].tolist() == expected


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("stride, shared", [(1, True), (4, False)])
def test_all_groups_are_one_stage(backend, stride, shared):
    q, k, ck = draw(70, 170, 4, 2, 16)
    call = dict(SIZES, importance="max", selection_stride=stride, backend=backend, q_offset=100)
    call |= dict(query_heads_share_selected_kv=shared)
    tokens = dict(compress_block_size=1, compress_block_sliding_stride=1)
    one = select_blocks(q, k, **call | tokens, seq_len=170)
    two = select_blocks(q, ck, **call, k=k, num_selected_groups=8)
    assert torch.equal(one, two) and (one >= 0).any()


@pytest.mark.gpu
@pytest.mark.parametrize("form", ["sm90", "portable"])
@pytest.mark.parametrize("D, s, n1, stride", [(128, 64, 5, 1), (64, 32, 16, 4), (128, 128, 2, 1)])
def test_tiles_that_share_groups(form, D, s, n1, stride):
    """Kernels of half precision rank as the specification does, but for near-ties."""
    S = 40 * s
    for T, H, K in ((S, 8, 4), (S // 2, 2, 2)):
        q, k, ck = draw(T, S, H, K, D, 16, torch.bfloat16)
        call = dict(SIZES, compress_block_size=16, compress_block_sliding_stride=16, k=k)
        call |= dict(selection_block_size=s, num_selected_groups=n1, num_selected_blocks=7)
        call |= dict(importance="max", selection_stride=stride)
        with running(form) as backend:
            found = select_blocks(q, ck, **call, backend=backend)
            assert torch.equal(found, select_blocks(q, ck, **call, backend=backend))
        expected = select_blocks(q, ck, **call, backend="eager")
        assert torch.equal(found < 0, expected < 0)
        sets = (t.sort(dim=-1).values for t in (found, expected))
        assert torch.eq(*sets).float().mean() > 0.98


def config_of(**changes):
    sizes = dict(dim=32, dim_head=16, heads=4, kv_heads=2, causal=True, dense_length=0)
    sizes |= dict(SIZES, num_selected_groups=2)
    return NSAConfig.preset("one-softmax", None, **sizes | changes)


@pytest.mark.parametrize("backend", BACKENDS)
@torch.no_grad()
def test_layer(backend):
    """Whole, packed and over caches it is the same layer; ranked by all groups, another."""
    config = config_of(backend=backend, num_selected_groups=1)
    layer = SparseAttention.from_config(config).to(DEVICE)
    x = torch.randn(2, 140, 32, device=DEVICE)
    out, indices = layer(x, return_block_indices=True)
    assert torch.equal(layer(x, block_indices=indices), out)
    cu = torch.tensor([0, 40, 140])
    parts = [layer(x[:1, a:b]) for a, b in ((0, 40), (40, 140))]
    packed = layer(x[:1], cu_seqlens=cu)
    torch.testing.assert_close(packed, torch.cat(parts, 1), atol=1e-5, rtol=1e-5)
    for cache in (nsa.KVCache(), nsa.PagedKVCache(32, 16, 2, 256)):
        bounds = ((0, 121), (121, 122), (122, 124), (124, 140))
        parts = [layer(x[:, a:b], cache=cache) for a, b in bounds]
        torch.testing.assert_close(torch.cat(parts, 1), out, atol=1e-5, rtol=1e-5)
    layer.num_selected_groups = 6
    assert not torch.equal(layer(x), out)


def test_gradients_and_cost():
    config = config_of()
    layer = SparseAttention.from_config(config).to(DEVICE)
    x = torch.randn(1, 200, 32, device=DEVICE, requires_grad=True)
    out, indices = layer(x, return_block_indices=True)
    grads = torch.autograd.grad(out.square().sum(), [x, *layer.parameters()])
    out = layer(x, block_indices=indices)
    again = torch.autograd.grad(out.square().sum(), [x, *layer.parameters()])
    for one, other in zip(grads, again):
        torch.testing.assert_close(one, other)
    few, many = (nsa_cost(config_of(num_selected_groups=n), 4096).sparse for n in (2, 40))
    every = nsa_cost(config_of(compress_block_size=1, num_selected_groups=0,
                               compress_block_sliding_stride=1), 4096).sparse  # fmt: skip
    assert few.attention_flops < many.attention_flops < every.attention_flops
    assert few.step_bytes < many.step_bytes < every.step_bytes


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(importance="probs"), "importance='max' or 'logits', got 'probs'"),
        (dict(causal=False), "causal=True, got False"),
        (dict(num_local_blocks=3), "num_local_blocks must be a positive multiple of 4"),
        (dict(rank_rotated=False), "rank_rotated=True"),
        (dict(branches=("compressed", "selected"), rank_rotated=False), "without 'compressed'"),
        (dict(use_diff_topk=True), "use_diff_topk=False, got True"),
        (dict(num_selected_groups=-1), "num_selected_groups must be"),
    ],
)
def test_refused(change, message):
    with pytest.raises(ValueError, match=message):
        config_of(**dict(dense_length=0) | change)


def test_refused_calls():
    q, k, ck = draw(8, 64, 2, 2, 16)
    with pytest.raises(ValueError, match="k and num_selected_groups go together"):
        select_blocks(q, ck, **SIZES, k=k)
    with pytest.raises(ValueError, match="cq must be None with num_selected_groups"):
        nsa.native_sparse_attention(
            q, k, k, ck, cq=q, **SIZES, num_selected_groups=2, branches=("selected",),
            importance="max", sliding_window_size=0,
        )  # fmt: skip
