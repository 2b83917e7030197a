"""Soft caps of the logits and attention sinks, in every branch and backend."""

import pytest
import torch

from native_sparse_attention import (
    KVCache,
    chunked_attention,
    compressed_attention,
    native_sparse_attention,
    select_blocks,
    selected_attention,
    sliding_window_attention,
)
from tests.helpers.budget import DEVICE, assert_right
from tests.helpers.layers import DIM, layer

SIZES = dict(compress_block_size=8, compress_block_sliding_stride=4, selection_block_size=8)
CAPS = pytest.mark.parametrize("soft_cap", [None, 1.5])


def draw(T=45, H=4, K=2, D=16, dtype=torch.float64):
    def normal(*shape):
        return 1.5 * torch.randn(*shape, dtype=dtype, device=DEVICE)

    return dict(
        q=normal(2, T, H, D), k=normal(2, T, K, D), v=normal(2, T, K, D),
        ck=normal(2, T // 4, K, D), cv=normal(2, T // 4, K, D), cq=normal(2, T, H, D),
        mem_k=normal(K, 2, D), mem_v=normal(K, 2, D), branch_gates=normal(2, T, H, 3),
    )  # fmt: skip


def sinks_of(H=4, dtype=torch.float64, branches=()):
    return torch.randn(*branches, H, dtype=dtype, device=DEVICE)


def branch(name, tensors, **kwargs):
    """One of the branches, and the tensors that it takes."""
    if name == "compressed":
        names = ("q", "ck", "cv", "mem_k", "mem_v")
        call = dict(compress_block_sliding_stride=4)
        return compressed_attention, {n: tensors[n] for n in names}, call | kwargs
    names = {n: tensors[n] for n in ("q", "k", "v")}
    if name == "window":
        return sliding_window_attention, names, dict(sliding_window_size=9) | kwargs
    T = tensors["q"].shape[1]
    lists = torch.rand(2, T, 2, T // 8, device=DEVICE).argsort(-1)[..., :3].to(torch.int32) - 1
    call = dict(block_indices=lists, selection_block_size=8, num_local_blocks=1 - ("bare" in name))
    return selected_attention, names, call | kwargs


BRANCHES = pytest.mark.parametrize("name", ["compressed", "selected", "selected, bare", "window"])


@pytest.mark.parametrize("w", [9, 100])
def test_window_against_chunked_attention(w):
    """Which was written apart."""
    tensors = {n: draw()[n] for n in ("q", "k", "v")}
    out = sliding_window_attention(**tensors, sliding_window_size=w, soft_cap=0.7, backend="eager")
    expected = chunked_attention(
        **tensors, causal=True, sliding_window_size=w, soft_cap=0.7, q_chunk_size=16
    )
    torch.testing.assert_close(out, expected)


@BRANCHES
def test_sink_is_a_key_of_value_0(name):
    """`out sigmoid(lse - sink)`, and `log(exp(lse) + exp(sink))`: also of a row without keys."""
    op, tensors, call = branch(name, draw(), return_lse=True, backend="eager")
    if name == "compressed":
        tensors["mem_k"] = tensors["mem_v"] = None
    sinks = sinks_of()
    out, lse = op(**tensors, **call)
    with_sinks, with_lse = op(**tensors, **call, sinks=sinks)
    assert lse.isneginf().any() == (name in ("compressed", "selected, bare"))
    torch.testing.assert_close(with_sinks, out * (lse - sinks).sigmoid()[..., None])
    torch.testing.assert_close(with_lse, torch.logaddexp(lse, sinks))


@BRANCHES
def test_gradients(name):
    op, tensors, call = branch(name, draw(T=17, H=2, K=1, D=3), soft_cap=0.8, backend="eager")
    call["block_indices"] = call["block_indices"][:, :, :1] if "block_indices" in call else None
    call = {n: t for n, t in call.items() if t is not None}
    names, leaves = zip(*tensors.items(), ("sinks", sinks_of(2)))
    leaves = [t.requires_grad_() for t in leaves]
    torch.autograd.gradcheck(lambda *t: op(**dict(zip(names, t)), **call), leaves, fast_mode=True)


@BRANCHES
@CAPS
def test_on_flex(name, soft_cap, untraced_flex):
    tensors = draw(dtype=torch.float32)
    op, tensors, call = branch(name, tensors, return_lse=True, soft_cap=soft_cap)
    call["sinks"] = sinks_of(dtype=torch.float32)
    expected = op(**tensors, **call, backend="eager")
    for a, b in zip(op(**tensors, **call, backend="flex"), expected):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)


def test_ranking_by_probabilities():
    """As branch 1 attends; the ranking by logits knows of neither."""
    tensors = {n: draw()[n] for n in ("q", "ck", "mem_k")}
    call = dict(SIZES, num_selected_blocks=2, backend="eager")
    sinks = sinks_of() * 5
    for changed in (dict(soft_cap=0.3), dict(sinks=sinks)):
        plain = select_blocks(**tensors, **call, importance="probs")
        other = select_blocks(**tensors, **call, importance="probs", **changed)
        assert (plain != other).any()
        plain = select_blocks(**tensors, **call)
        assert torch.equal(plain, select_blocks(**tensors, **call, **changed))


# on the kernels


@pytest.mark.slow(one_of=3)
@pytest.mark.kernels
@BRANCHES
@CAPS
@pytest.mark.parametrize("H", [2, 18])
def test_by_kernels(name, soft_cap, H):
    if H > 2 and (soft_cap is None or not name.startswith("selected")):
        pytest.skip("one kernel for all groups")
    tensors = draw(23 if H == 2 else 15, H, dtype=torch.float32)
    op, tensors, call = branch(name, tensors, soft_cap=soft_cap, return_lse=True)
    tensors["sinks"] = sinks_of(H, torch.float32)
    assert_right(op, tensors, torch.float32, **call)


@pytest.mark.kernels
@CAPS
def test_ranking_by_kernels(soft_cap):
    tensors = {n: draw(dtype=torch.float32)[n] for n in ("q", "ck", "mem_k")}
    tensors["sinks"] = sinks_of(dtype=torch.float32)
    call = dict(SIZES, num_selected_blocks=2, importance="probs", soft_cap=soft_cap)
    lists = select_blocks(**tensors, **call, backend="triton")
    tensors = {n: t.double() for n, t in tensors.items()}
    assert torch.equal(lists, select_blocks(**tensors, **call, backend="eager"))


@pytest.mark.kernels
@CAPS
def test_gates_by_kernels(soft_cap):
    """Gradients that reach the scores, and sinks, through the gates."""
    tensors = {n: draw(21, 2, 1, dtype=torch.float32)[n] for n in ("q", "ck", "mem_k")}
    tensors["sinks"] = sinks_of(2, torch.float32)
    call = dict(SIZES, num_selected_blocks=2, importance="probs", soft_cap=soft_cap)
    call["return_gates"] = True
    weights = torch.randn(2, 21, 1, 2, device=DEVICE)

    def gradients(dtype, backend):
        leaves = {n: t.to(dtype).requires_grad_() for n, t in tensors.items()}
        _, gates = select_blocks(**leaves, **call, backend=backend)
        return torch.autograd.grad((gates * weights).sum(), leaves.values())

    low, exact = gradients(torch.float32, "eager"), gradients(torch.float64, "eager")
    for name, a, b, c in zip(tensors, gradients(torch.float32, "triton"), low, exact):
        ulp = torch.finfo(torch.float32).eps * weights.norm(dim=-1).max() * 4
        assert c.abs().max() > 0 and a.shape == c.shape
        assert (a - c).abs().max() <= 2 * (b - c).abs().max() + ulp, name


LAYERS = {
    "shared window": {},
    "apart, again": dict(recompute=True, sliding_window_size=3, num_initial_blocks=1),
    "gates": dict(use_diff_topk=True, importance="probs"),
    "gates, logits": dict(use_diff_topk=True),
    "not causal": dict(causal=False, importance="probs"),
}


@pytest.mark.slow(one_of=3)
@pytest.mark.kernels
@pytest.mark.parametrize("setting", LAYERS)
def test_layer_by_kernels(setting):
    tensors = draw(26, H=2, K=1, dtype=torch.float32)
    if setting == "not causal":
        tensors |= {n: torch.cat((tensors[n], tensors[n][:, :1]), 1) for n in ("ck", "cv")}
    tensors["sinks"] = sinks_of(2, torch.float32, branches=(3,))
    call = SIZES | dict(num_selected_blocks=2, sliding_window_size=17) | LAYERS[setting]
    assert_right(native_sparse_attention, tensors, torch.float32, soft_cap=1.5, **call)


# the module


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
        (dict(sinks=torch.zeros(3)), r"sinks must be floating, of shape \[4\]"),
        (dict(sinks=torch.zeros(4, dtype=torch.long)), "sinks must be floating"),
    ],
)
def test_bad_input(kwargs, message):
    tensors = {n: draw()[n] for n in ("q", "k", "v")}
    with pytest.raises(ValueError, match=message):
        sliding_window_attention(**tensors, sliding_window_size=2, **kwargs)
