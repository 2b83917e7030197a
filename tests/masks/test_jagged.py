"""Packed sequences: each as it is alone, whatever their lengths."""

import itertools

import pytest
import torch

from native_sparse_attention import masks

LENGTHS = (5, 0, 1, 13, 131, 2)


def nested(lengths, heads, width, dtype=torch.float64, device="cpu", offsets=None):
    """A nested tensor [B j heads width], and the leaf that holds its values."""
    if offsets is None:
        offsets = torch.tensor([0, *itertools.accumulate(lengths)], device=device)
    values = torch.randn(sum(lengths), heads, width, dtype=dtype, device=device)
    values.requires_grad_()
    return torch.nested.nested_tensor_from_jagged(values, offsets), values


def alone(values, lengths, mask_mod, score_mod=None, scale=None):
    """Sequence by sequence, [tokens heads width] in and out."""
    outs = []
    for q, k, v in zip(*(t.split(list(n)) for t, n in zip(values, lengths))):
        if not len(q):
            continue
        rows = (t.transpose(0, 1)[None] for t in (q, k, v))
        out = masks.dense_attention(*rows, mask_mod=mask_mod, score_mod=score_mod, scale=scale)
        outs.append(out[0].transpose(0, 1))
    return torch.cat(outs)


def test_score_mods_get_the_sequence_and_positions():
    def code(score, b, h, q_idx, kv_idx):
        return score + 100 * b + 10 * q_idx + kv_idx

    mod = masks.jagged_score_mod(code, torch.tensor([0, 2, 5]))
    i = torch.arange(5)
    scores = mod(torch.zeros(5), 0 * i, 0 * i, i, i.flip(0))
    assert torch.equal(scores, torch.tensor([2.0, 11, 100, 111, 120]))


@pytest.mark.parametrize("score", ["no score", "alibi", "cap"])
@pytest.mark.parametrize("mask_mod", [None, masks.causal, masks.sliding_window(4)])
def test_each_sequence_as_alone(mask_mod, score):
    """Grouped heads, values of another width, a total of 152, forward and backward."""
    score_mod = {"alibi": masks.alibi(4), "cap": masks.soft_cap(0.8, True)}.get(score)
    nests, leaves = zip(nested(LENGTHS, 4, 8), nested(LENGTHS, 2, 8), nested(LENGTHS, 2, 6))
    expected = alone(leaves, [LENGTHS] * 3, mask_mod, score_mod, 0.4)
    out = masks.jagged_attention(*nests, mask_mod, score_mod=score_mod, scale=0.4)
    assert out.is_nested and out.layout == torch.jagged and out.offsets() is nests[0].offsets()
    torch.testing.assert_close(out.values(), expected, rtol=0, atol=1e-12)
    bwd = torch.randn_like(expected)
    grads = torch.autograd.grad(out.values(), leaves, bwd)
    for grad, right in zip(grads, torch.autograd.grad(expected, leaves, bwd)):
        torch.testing.assert_close(grad, right, rtol=0, atol=1e-12)
    if score_mod is None and mask_mod is not None:
        shared = masks.jagged_block_mask(mask_mod, nests[0].offsets())
        assert shared.shape == (1, 1, 152, 152)
        again = masks.jagged_attention(*nests, block_mask=shared, scale=0.4)
        assert torch.equal(again.values(), out.values())


@pytest.mark.parametrize(("lengths", "kv_lengths"), [((0, 0), (0, 0)), ((2, 1), (0, 0))])
def test_no_token_at_all(lengths, kv_lengths):
    q, q_values = nested(lengths, 2, 8)
    k, k_values = nested(kv_lengths, 2, 8)
    out = masks.jagged_attention(q, k, k, masks.causal, score_mod=masks.alibi(2)).values()
    assert torch.equal(out, torch.zeros(sum(lengths), 2, 8))
    for grad in torch.autograd.grad(out.sum(), [q_values, k_values]):
        assert not grad.any()


def test_keys_of_their_own():
    q_lengths, kv_lengths = (3, 1, 0, 6), (2, 0, 4, 9)
    q, q_values = nested(q_lengths, 2, 8)
    k, k_values = nested(kv_lengths, 2, 8)
    v, v_values = nested(kv_lengths, 2, 8, offsets=k.offsets())
    out = masks.jagged_attention(q, k, v, masks.causal)
    lengths = [q_lengths, kv_lengths, kv_lengths]
    values = [q_values, k_values, v_values]
    torch.testing.assert_close(out.values(), alone(values, lengths, masks.causal))
    # the second sequence has no key
    assert not out.values()[3].any() and out.values()[:3].all()
    for grad in torch.autograd.grad(out.values().sum(), values):
        assert grad.isfinite().all()


@pytest.mark.gpu
@pytest.mark.parametrize("lengths", [(5, 0, 1, 13, 131, 2), (128, 128), (1,), (700, 301)])
def test_gpu_each_sequence_as_alone(lengths):
    """Compiled, at totals that are multiples of nothing; the offsets change, the function stays."""
    parts = [nested(lengths, h, 32, torch.float32, "cuda") for h in (4, 2, 2)]
    values = [leaf for _, leaf in parts]
    exact = [t.detach().double().requires_grad_() for t in values]
    (q, _), (k, _), (v, _) = parts
    for mask_mod, score_mod in (
        (masks.causal, None),
        (masks.sliding_window(4), masks.soft_cap(3.0)),
    ):
        out = masks.jagged_attention(q, k, v, mask_mod, score_mod=score_mod)
        expected = alone(exact, [lengths] * 3, mask_mod, score_mod)
        torch.testing.assert_close(out.values().double(), expected, rtol=0, atol=2e-3)
        bwd = torch.randn_like(out.values())
        grads = torch.autograd.grad(out.values(), values, bwd)
        right = torch.autograd.grad(expected, exact, bwd.double())
        for grad, expected_grad in zip(grads, right):
            torch.testing.assert_close(grad.double(), expected_grad, rtol=0, atol=2e-3)
