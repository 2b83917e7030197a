"""Packed sequences: each as it is alone, whatever their lengths."""

from __future__ import annotations

import itertools

import pytest
import torch

from native_sparse_attention import masks
from tests.helpers.pictures import dense, drawn

LENGTHS = (5, 0, 1, 13, 131, 2)


def offsets_of(lengths, device="cpu"):
    return torch.tensor([0, *itertools.accumulate(lengths)], device=device)


def nested(lengths, heads, width, dtype=torch.float64, device="cpu", offsets=None):
    """A nested tensor [B j heads width], and the leaf that holds its values."""
    offsets = offsets_of(lengths, device) if offsets is None else offsets
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


# mods


PREFIX = torch.tensor([0, 2, 1])
DRAWN = {
    "window": (
        masks.jagged_mask_mod(masks.sliding_window(1), torch.tensor([0, 2, 3, 3, 6])),
        "x..... xx.... ..x... ...x.. ...xx. ....xx",
    ),
    "everything": (masks.jagged_mask_mod(None, torch.tensor([0, 2, 3])), "xx. xx. ..x"),
    "keys of their own": (
        masks.jagged_mask_mod(masks.causal, torch.tensor([0, 3, 5]), torch.tensor([0, 1, 4])),
        "x... x... x... .x.. .xx.",
    ),
    # a prefix of its own for every sequence
    "number of the sequence": (
        masks.jagged_mask_mod(lambda b, h, i, j: j < PREFIX[b], torch.tensor([0, 2, 5, 7])),
        "....... ....... ..xx... ..xx... ..xx... .....x. .....x.",
    ),
}


@pytest.mark.parametrize("name", DRAWN)
def test_drawn(name):
    mod, picture = DRAWN[name]
    expected = drawn(picture)
    assert torch.equal(dense(mod, *expected.shape), expected)


def test_score_mods_get_the_sequence_and_positions():
    def code(score, b, h, q_idx, kv_idx):
        return score + 100 * b + 10 * q_idx + kv_idx

    mod = masks.jagged_score_mod(code, torch.tensor([0, 2, 5]))
    i = torch.arange(5)
    scores = mod(torch.zeros(5), 0 * i, 0 * i, i, i.flip(0))
    assert torch.equal(scores, torch.tensor([2.0, 11, 100, 111, 120]))


# nested tensors


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


# on the CPU torch's has no causal mask
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.parametrize(
    ("device", "causal"), [("cpu", False), pytest.param("cuda", True, marks=pytest.mark.gpu)]
)
def test_like_nested_sdpa(device, causal):
    """What torch itself makes of nested tensors, gradients through the nested tensors too."""
    offsets = offsets_of((5, 3, 7), device)
    tensors = []
    for _ in range(3):
        values = torch.randn(15, 2, 32, device=device)
        tensor = torch.nested.nested_tensor_from_jagged(values, offsets)
        tensors.append(tensor.requires_grad_())
    out = masks.jagged_attention(*tensors, masks.causal if causal else None)
    rows = (t.transpose(1, 2) for t in tensors)
    expected = torch.nn.functional.scaled_dot_product_attention(*rows, is_causal=causal)
    expected = expected.transpose(1, 2).contiguous()
    close = {"rtol": 0, "atol": 2e-3} if device == "cuda" else {}
    torch.testing.assert_close(out.values(), expected.values(), **close)
    grads = torch.autograd.grad((out * out).sum(), tensors)
    right = torch.autograd.grad((expected * expected).sum(), tensors)
    for grad, expected_grad in zip(grads, right):
        torch.testing.assert_close(grad.values(), expected_grad.values(), **close)
    # of the same offsets: they add up
    assert torch.equal((out + tensors[0]).values(), out.values() + tensors[0].values())


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


def test_low_precision():
    (q, _), (k, _), (v, _) = (nested((3, 9), 2, 16, torch.bfloat16) for _ in range(3))
    out = masks.jagged_attention(q, k, v, masks.causal)
    exact = masks.jagged_attention(q.double(), k.double(), v.double(), masks.causal)
    assert out.dtype == torch.bfloat16
    eps = torch.finfo(torch.bfloat16).eps
    torch.testing.assert_close(out.values().double(), exact.values(), rtol=0, atol=4 * eps)


# on a GPU


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


@pytest.mark.gpu
def test_gpu_says_what_flex_cannot():
    parts = [nested((4, 3), 1, 8, torch.float64, "cuda")[0] for _ in range(3)]
    with pytest.raises(NotImplementedError, match="no float64 and need head widths of at least 16"):
        masks.jagged_attention(*parts)


# what is refused

A, B = nested((2, 3), 2, 8)[0], nested((3, 2), 2, 8)[0]
THREE = nested((2, 2, 1), 2, 8)[0]
OFFSETS = torch.tensor([0, 2, 5])
FULL = masks.jagged_block_mask(None, OFFSETS)


def attend(q=A, k=A, v=A, *args, **kwargs):
    return masks.jagged_attention(q, k, v, *args, **kwargs)


BAD = [
    (lambda: masks.jagged_mask_mod(None, OFFSETS.float()), "offsets must be an integer tensor"),
    (lambda: masks.jagged_mask_mod(None, OFFSETS, OFFSETS[:2]), "kv_offsets must be of 2 sequenc"),
    (lambda: masks.jagged_score_mod(masks.relative_position, OFFSETS[:1]), "offsets must hold two"),
    (lambda: masks.jagged_block_mask(None, torch.tensor([0, 0])), "q_len must"),
    (lambda: attend(q=A.values()), "q must be a nested tensor of layout torch.jagged, got a ten"),
    (lambda: attend(k=None), "k must be a nested tensor of layout torch.jagged, got NoneType"),
    (lambda: attend(v=A.transpose(1, 2)), r"v must have shape \[B, j, heads, width\]"),
    (lambda: attend(v=B), "k and v must have the same offsets"),
    (lambda: attend(q=THREE), "q has B=3 but k has B=2"),
    (lambda: attend(k=nested((2, 3), 2, 4)[0]), "k has D=4 but q has D=8"),
    (lambda: attend(q=nested((2, 3), 3, 8)[0]), "heads must be a multiple of kv_heads"),
    (lambda: attend(A, A, A, masks.causal, block_mask=FULL), "mask_mod or block_mask must be giv"),
    (
        lambda: attend(block_mask=masks.jagged_block_mask(None, torch.tensor([0, 4]))),
        "block_mask must be of 5 queries and 5 keys, got 4 and 4",
    ),
]


@pytest.mark.parametrize(("call", "told"), BAD)
def test_bad_arguments_are_named(call, told):
    with pytest.raises(ValueError, match=f"^{told}"):
        call()


def test_holes_are_refused():
    values = torch.randn(6, 2, 8)
    holes = torch.nested.nested_tensor_from_jagged(
        values, torch.tensor([0, 3, 6]), lengths=torch.tensor([2, 3])
    )
    with pytest.raises(ValueError, match="^q must have no holes between its sequences"):
        masks.jagged_attention(holes, holes, holes)
