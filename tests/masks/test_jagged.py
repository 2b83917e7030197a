"""Packed sequences: each as it is alone, whatever their lengths."""

from __future__ import annotations

import itertools

import pytest
import torch

from native_sparse_attention import masks
from native_sparse_attention.masks import jagged
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


def test_drawn():
    expected = """
        x.....
        xx....
        ..x...
        ...x..
        ...xx.
        ....xx
    """
    mod = masks.jagged_mask_mod(masks.sliding_window(1), torch.tensor([0, 2, 3, 3, 6]))
    assert torch.equal(dense(mod, 6), drawn(expected))
    everything = masks.jagged_mask_mod(None, torch.tensor([0, 2, 3]))
    assert torch.equal(dense(everything, 3), drawn("xx. xx. ..x"))


def test_drawn_with_keys_of_their_own():
    mod = masks.jagged_mask_mod(masks.causal, torch.tensor([0, 3, 5]), torch.tensor([0, 1, 4]))
    assert torch.equal(dense(mod, 5, 4), drawn("x... x... x... .x.. .xx."))


def test_mods_are_asked_for_the_sequence_and_the_place():
    """A prefix of its own for every sequence; places begin again."""
    prefix = torch.tensor([0, 2, 1])

    def mod(b, h, q_idx, kv_idx):
        return kv_idx < prefix[b]

    found = dense(masks.jagged_mask_mod(mod, torch.tensor([0, 2, 5, 7])), 7)
    expected = """
        .......
        .......
        ..xx...
        ..xx...
        ..xx...
        .....x.
        .....x.
    """
    assert torch.equal(found, drawn(expected))

    def place(score, b, h, q_idx, kv_idx):
        return score + 100 * b + 10 * q_idx + kv_idx

    asked = masks.jagged_score_mod(place, torch.tensor([0, 2, 5]))
    i = torch.arange(5)
    found = asked(torch.zeros(5), 0 * i, 0 * i, i, i.flip(0))
    assert torch.equal(found, torch.tensor([2.0, 11, 100, 111, 120]))


# nested tensors


def score_mods(heads):
    return {
        "no score": None,
        "alibi": masks.alibi(heads),
        "cap": masks.soft_cap(0.8, approximate=True),
    }


@pytest.mark.usefixtures("untraced_flex")
@pytest.mark.parametrize("score", score_mods(1))
@pytest.mark.parametrize("mask_mod", [None, masks.causal, masks.sliding_window(4)])
def test_each_sequence_as_alone(mask_mod, score):
    """Grouped heads, values of another width, a total of 152: by the definition with gradients,
    through flex_attention without."""
    (q, _), (k, _), (v, _) = parts = (
        nested(LENGTHS, 4, 8),
        nested(LENGTHS, 2, 8),
        nested(LENGTHS, 2, 6),
    )
    values = [leaf for _, leaf in parts]
    score_mod = score_mods(4)[score]
    expected = alone(values, [LENGTHS] * 3, mask_mod, score_mod, 0.4)
    out = masks.jagged_attention(q, k, v, mask_mod, score_mod=score_mod, scale=0.4)
    assert out.is_nested and out.layout == torch.jagged and out.offsets() is q.offsets()
    torch.testing.assert_close(out.values(), expected, rtol=0, atol=1e-12)
    bwd = torch.randn_like(expected)
    got = torch.autograd.grad(out.values(), values, bwd)
    for grad, right in zip(got, torch.autograd.grad(expected, values, bwd)):
        torch.testing.assert_close(grad, right, rtol=0, atol=1e-12)
    with torch.no_grad():
        out = masks.jagged_attention(q, k, v, mask_mod, score_mod=score_mod, scale=0.4)
    assert not out.requires_grad
    torch.testing.assert_close(out.values(), expected, rtol=0, atol=1e-12)


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


def test_a_block_mask_for_many_layers():
    (q, _), (k, _), (v, _) = (nested(LENGTHS, 2, 8) for _ in range(3))
    block_mask = masks.jagged_block_mask(masks.causal, q.offsets())
    assert block_mask.shape == (1, 1, 152, 152)
    with torch.no_grad():
        made = masks.jagged_attention(q, k, v, block_mask=block_mask)
        own = masks.jagged_attention(q, k, v, masks.causal)
    assert torch.equal(made.values(), own.values())
    with_gradients = masks.jagged_attention(q, k, v, block_mask=block_mask)
    torch.testing.assert_close(with_gradients.values(), own.values())


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
    with pytest.raises(NotImplementedError, match="no float64; q has head width 8, needs at le"):
        masks.jagged_attention(*parts)


def test_why_not():
    q = torch.zeros(1, 1, 4, 8)
    assert jagged.why_not(q, q.new_zeros(1, 1, 4, 16)) == ["q has head width 8, needs at least 16"]
    wide = torch.zeros(1, 1, 4, 64)
    assert jagged.why_not(wide, wide) == []
    assert jagged.why_not(wide.double(), wide) == ["its CUDA kernels have no float64"]


# what is refused

A, B = nested((2, 3), 2, 8)[0], nested((3, 2), 2, 8)[0]
THREE = nested((2, 2, 1), 2, 8)[0]
OFFSETS = torch.tensor([0, 2, 5])


def attend(q=A, k=A, v=A, *args, **kwargs):
    return masks.jagged_attention(q, k, v, *args, **kwargs)


BAD = [
    (lambda: masks.jagged_mask_mod(None, torch.tensor([0, 3, 2])), "offsets must not decrease, go"),
    (lambda: masks.jagged_mask_mod(None, OFFSETS.float()), "offsets must be an integer tensor"),
    (lambda: masks.jagged_mask_mod(None, OFFSETS[1:]), "offsets must begin with 0, got 2"),
    (lambda: masks.jagged_mask_mod(None, OFFSETS, OFFSETS[:2]), "kv_offsets must be of 2 sequenc"),
    (lambda: masks.jagged_score_mod(masks.relative_position, OFFSETS[:1]), "offsets must hold two"),
    (lambda: masks.jagged_block_mask(None, torch.tensor([0, 0])), "q_len must"),
    (
        lambda: attend(q=A.values()),
        "q must be a nested tensor of layout torch.jagged, got a tensor",
    ),
    (lambda: attend(k=None), "k must be a nested tensor of layout torch.jagged, got NoneType"),
    (lambda: attend(v=A.transpose(1, 2)), r"v must have shape \[B, j, heads, width\]"),
    (lambda: attend(v=B), "k and v must have the same offsets"),
    (lambda: attend(q=THREE), "q has B=3 but k has B=2"),
    (lambda: attend(k=nested((2, 3), 2, 4)[0]), "k has D=4 but q has D=8"),
    (lambda: attend(k=nested((2, 3), 3, 8)[0]), "v has K=2 but k has K=3"),
    (lambda: attend(q=nested((2, 3), 3, 8)[0]), "heads must be a multiple of kv_heads"),
    (lambda: attend(k=A.float()), "k is torch.float32 but q is torch.float64"),
    (lambda: attend(*[nested((0, 0), 2, 8)[0]] * 3), "q and k must hold one token at least"),
    (
        lambda: attend(A, A, A, masks.causal, block_mask=masks.jagged_block_mask(None, OFFSETS)),
        "mask_mod or block_mask must be given, and not both",
    ),
    (
        lambda: attend(block_mask=masks.jagged_block_mask(None, torch.tensor([0, 4]))),
        "block_mask must be of 5 queries and 5 keys, got 4 and 4",
    ),
]


@pytest.mark.parametrize(("call", "told"), BAD, ids=[told for _, told in BAD])
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
