"""SparseAttention as a module: its laws, and everything a user does to a module."""

import copy
import io
import itertools

import pytest
import torch
import torch.nn.functional as F
from rotary_embedding_torch import RotaryEmbedding
from torch import nn
from torch.nn.attention.flex_attention import create_block_mask

from native_sparse_attention import KVCache, SparseAttention
from native_sparse_attention.compress import MeanPool
from native_sparse_attention.masks import create_fine_mask, create_sliding_mask
from native_sparse_attention.rotary import rotation
from tests.helpers.layers import DIM, SETTINGS, layer
from tests.helpers.memory import poisoned


def normal(*shape, dtype=torch.float64):
    return torch.randn(*shape, dtype=dtype)


def close(actual, expected, tol=1e-12):
    torch.testing.assert_close(actual, expected, atol=tol, rtol=tol)


@pytest.mark.slow(one_of=4)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("setting", SETTINGS)
def test_any_length(setting, causal):
    module = layer(**SETTINGS[setting], causal=causal)
    for length in (0, 1, 2, 3, 4, 7, 8, 9, 16, 17, 31):
        x = normal(2, length, DIM).requires_grad_()
        out = module(x)
        assert out.shape == x.shape and out.isfinite().all()
        grads = torch.autograd.grad(out.sum(), [x, *module.parameters()], materialize_grads=True)
        assert all(g.isfinite().all() for g in grads)
    assert module(normal(0, 9, DIM)).shape == (0, 9, DIM)


@pytest.mark.parametrize("setting", SETTINGS)
def test_the_future_cannot_move_the_past(setting):
    module = layer(**SETTINGS[setting])
    x = normal(2, 41, DIM)
    out = module(x)
    for end in (1, 8, 16, 23, 40):
        other = torch.cat((x[:, :end], normal(2, 41 - end, DIM)), dim=1)
        close(module(other)[:, :end], out[:, :end])
        close(module(x[:, :end]), out[:, :end])


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("setting", SETTINGS)
def test_a_row_alone_is_the_row_in_a_batch(setting, causal):
    module = layer(**SETTINGS[setting], causal=causal)
    x = normal(3, 29, DIM)
    close(module(x[1:2]), module(x)[1:2])


def test_two_sided_sees_everything():
    """Not causal, every token moves every output: through the window, a block or a summary."""
    module = layer(causal=False)
    x = normal(1, 27, DIM).requires_grad_()
    for i in (0, 13, 26):
        (grad,) = torch.autograd.grad(module(x)[0, i].sum(), x)
        assert (grad[0].abs().sum(-1) > 0).all()


def test_diff_topk_reaches_the_scores():
    """The gates change gradients, never values."""
    torch.manual_seed(1)
    gated = layer(use_diff_topk=True)
    plain = layer(use_diff_topk=False)
    plain.load_state_dict(gated.state_dict())
    x = normal(2, 40, DIM)
    grads = []
    for module in (gated, plain):
        out = module(x)
        grads.append(torch.autograd.grad(out.square().sum(), module.k_intrablock_positions)[0])
    close(gated(x), plain(x))
    assert (grads[0] - grads[1]).abs().max() > 1e-6


def test_seed_example():
    """The usage example of the seed document, as written."""
    dim = 512
    dim_head = 64
    heads = 8
    sliding_window_size = 64
    compress_block_size = 32
    selection_block_size = 16
    num_selected_blocks = 8
    sparse_attn = SparseAttention(
        dim=dim,
        dim_head=dim_head,
        heads=heads,
        sliding_window_size=sliding_window_size,
        compress_block_size=compress_block_size,
        selection_block_size=selection_block_size,
        num_selected_blocks=num_selected_blocks,
        causal=True,
    )
    batch_size = 2
    seq_len = 128
    input_tensor = torch.randn(batch_size, seq_len, dim)
    output_tensor, cache_updates = sparse_attn(input_tensor, return_cache=True)
    assert output_tensor.shape == (2, 128, 512)
    assert len(cache_updates) == 128
    input_tensor_next = torch.randn(batch_size, 1, dim)
    output_tensor_next, cache_updates_next = sparse_attn(
        input_tensor_next, cache=cache_updates, return_cache=True
    )
    assert output_tensor_next.shape == (2, 1, 512)
    assert len(cache_updates_next) == 129


# masks handed in


@pytest.mark.slow(one_of=8)
@pytest.mark.parametrize("length", [1, 13, 40, 150])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("setting", ["default", "own rankings", "paper", "independent"])
def test_flex_masks(setting, causal, length):
    module = layer(**SETTINGS[setting], causal=causal, dtype=torch.float32)
    x = normal(2, length, DIM, dtype=torch.float32)
    with torch.no_grad():
        expected = module(x)
        out = module(
            x,
            sliding_window_flex_mask=create_sliding_mask(length, 5, causal, "cpu"),
            fine_selection_flex_mask=create_fine_mask(length, 8, causal=causal),
        )
        close(out, expected, 1e-5)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("setting", ["default", "own rankings", "paper"])
def test_fine_mask_of_others(setting, causal):
    """Made from block indices of 0 and more alone, as published ones are."""
    module = layer(**SETTINGS[setting], causal=causal, dtype=torch.float32)
    x = normal(2, 40, DIM, dtype=torch.float32)

    def fine_mask(indices, num_grouped_queries=1):
        assert indices.min() >= 0
        b, h = indices.shape[:2]
        chosen = torch.zeros(b, h, 40, 5, dtype=torch.bool).scatter_(-1, indices, True)

        def sees(b, h, i, j):
            there = chosen[b, h // num_grouped_queries, i, j // 8]
            return (i >= j) & (there | (i // 8 == j // 8)) if causal else there

        return create_block_mask(sees, b, h * num_grouped_queries, 40, 40, device="cpu")

    with torch.no_grad():
        close(module(x, fine_selection_flex_mask=fine_mask), module(x), 1e-5)


def test_flex_backend():
    module = layer(dtype=torch.float32)
    x = normal(2, 70, DIM, dtype=torch.float32)
    expected = module(x)
    module.backend = "flex"
    with torch.no_grad():
        close(module(x), expected, 1e-5)
    with pytest.raises(NotImplementedError, match="backend 'flex' cannot run this call.*gradients"):
        module(x)


FLEX_SETTINGS = [
    "default",
    "stride = window",
    "window of windows",
    "paper",
    "shared rankings",
    "own rankings",
    "independent",
    "no memory",
    "no selection",
]


@pytest.mark.slow(one_of=3)
@pytest.mark.parametrize("setting", FLEX_SETTINGS)
@torch.no_grad()
def test_laws_in_flex(setting, untraced_flex):
    """Over two tiles of 128: one forward is the eager one, chunks are one forward, the future
    cannot move the past, a row alone is the row in a batch."""
    module = layer(**SETTINGS[setting], backend="flex")
    x = normal(2, 139, DIM)
    out = module(x)
    cache = KVCache()
    chunks = [module(part, cache=cache) for part in x.split([6, 1, 121, 1, 1, 9], dim=1)]
    close(torch.cat(chunks, dim=1), out)
    for end in (1, 23, 128):
        other = torch.cat((x[:, :end], normal(2, 139 - end, DIM)), dim=1)
        close(module(other)[:, :end], out[:, :end])
        close(module(x[:, :end]), out[:, :end])
    close(module(x[1:2]), out[1:2])
    module.backend = "eager"
    close(module(x), out)


# what a user does to a module


def test_state_dict_and_deepcopy():
    module = layer()
    x = normal(2, 20, DIM)
    other = layer()
    buffer = io.BytesIO()
    torch.save(module.state_dict(), buffer)
    buffer.seek(0)
    other.load_state_dict(torch.load(buffer, weights_only=True))
    close(other(x), module(x))
    close(copy.deepcopy(module)(x), module(x))
    assert set(module.state_dict()) == {
        "norm.weight",
        "rotary_emb.freqs",
        "to_qkv.weight",
        "compress_mem_kv",
        "k_intrablock_positions",
        "v_intrablock_positions",
        *(f"{c}_compress.{i}.{w}" for c in "kv" for i in (1, 3) for w in ("weight", "bias")),
        "to_strategy_combine.0.weight",
        "to_strategy_combine.0.bias",
        "combine_heads.weight",
    }


def test_initial_gate():
    module = SparseAttention(24, 8, 3, 4, 4, 4, 2)
    x = torch.randn(1, 5, 24)
    gate = module.to_strategy_combine(x)
    expected = torch.tensor([-2.0, -2.0, 2.0]).sigmoid().expand(1, 5, 3, 3)
    torch.testing.assert_close(gate, expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_dtypes(dtype):
    """A cast layer stays near the fp64 one, far into a sequence too: its rotary angles are fp32."""
    # all blocks selected: no near-tie in the ranking can matter
    exact = layer(num_selected_blocks=500)
    cast = copy.deepcopy(exact).to(dtype)
    assert cast.rotary_emb.freqs.dtype == (torch.float32 if dtype.itemsize == 2 else dtype)
    exact.load_state_dict(cast.state_dict())
    x = normal(1, 600, DIM).to(dtype)
    out = cast(x)
    expected = exact(x.double())
    assert out.dtype == dtype
    error = (out.double() - expected).norm() / expected.norm()
    assert error < 16 * torch.finfo(dtype).eps


@pytest.mark.parametrize("setting", SETTINGS)
def test_autocast(setting):
    module = layer(**SETTINGS[setting], dtype=torch.float32)
    x = normal(2, 33, DIM, dtype=torch.float32).requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out, cache = module(x, return_cache=True)
        step, _ = module(x[:, :3].detach(), cache=cache, return_cache=True)
    assert out.dtype == torch.bfloat16 and step.shape == (2, 3, DIM)
    out.float().sum().backward()
    assert x.grad.dtype == torch.float32 and x.grad.isfinite().all()


def test_train_and_eval_are_one():
    module = layer()
    x = normal(1, 20, DIM)
    close(module.eval()(x), module.train()(x))


# a quarter of a minute each
COMPILED = ["shared rankings, probs", "diff top-k"][: 1 + torch.cuda.is_available()]


@pytest.mark.slow
@pytest.mark.parametrize("setting", COMPILED)
def test_compiles_in_one_graph(setting):
    """Forward and backward, and another length without a graph for each."""
    module = layer(**SETTINGS[setting], dtype=torch.float32)
    torch.compiler.reset()
    compiled = torch.compile(module, fullgraph=True, dynamic=True, backend="eager")
    for length in (40, 57):
        x = normal(2, length, DIM, dtype=torch.float32).requires_grad_()
        y = x.detach().clone().requires_grad_()
        # in this order: the first call ever changes what einops knows, for which it compiles anew
        expected = module(y)
        with torch._dynamo.config.patch(error_on_recompile=True):
            out = compiled(x)
        close(out, expected, 1e-5)
        out.sum().backward()
        expected.sum().backward()
        close(x.grad, y.grad, 1e-4)


def test_activation_checkpointing():
    module = layer()
    x = normal(2, 30, DIM).requires_grad_()
    out = torch.utils.checkpoint.checkpoint(module, x, use_reentrant=False)
    (grad,) = torch.autograd.grad(out.square().sum(), x)
    (expected,) = torch.autograd.grad(module(x).square().sum(), x)
    close(grad, expected)


def test_deterministic():
    module = layer(**SETTINGS["paper"], dtype=torch.float32)
    x = normal(2, 50, DIM, dtype=torch.float32)
    grads = []
    with poisoned():
        for _ in range(2):
            module.zero_grad()
            module(x).square().sum().backward()
            grads.append(torch.cat([p.grad.flatten() for p in module.parameters()]))
    assert torch.equal(*grads) and grads[0].isfinite().all()


def test_non_contiguous_input():
    module = layer()
    x = normal(30, 2, DIM).transpose(0, 1)
    close(module(x), module(x.contiguous()))


def test_meta_and_to_empty():
    with torch.device("meta"):
        module = SparseAttention(24, 8, 4, 4, 8, 8, 2, causal=True)
    source = SparseAttention(24, 8, 4, 4, 8, 8, 2, causal=True)
    module = module.to_empty(device="cpu")
    module.load_state_dict(source.state_dict())
    x = torch.randn(1, 20, 24)
    torch.testing.assert_close(module(x), source(x))


# parts handed in


def test_custom_networks():
    rotary = RotaryEmbedding(8)
    module = layer(
        compress_mlp=MeanPool(),
        strategy_combine_mlp=nn.Sequential(nn.Linear(DIM, 6), nn.SiLU(), nn.Linear(6, 12)),
        rotary_emb=rotary,
    )
    assert module.rotary_emb is rotary and module.k_compress is not module.v_compress
    plain = layer()
    assert module(normal(2, 20, DIM)).shape == (2, 20, DIM)
    with torch.no_grad():
        module = layer(rotary_emb=RotaryEmbedding(8))
        module.load_state_dict(plain.state_dict())
    x = normal(1, 30, DIM)
    close(module(x), plain(x))


def test_a_cast_rotary_embedding_tells_positions_apart():
    """In bf16 its frequencies are rounded, its positions are not."""
    q = torch.ones(1, 1, 600, 8, dtype=torch.bfloat16)
    rotary = RotaryEmbedding(8).bfloat16()
    exact = RotaryEmbedding(8)
    exact.load_state_dict(rotary.state_dict())
    out = rotation(rotary, q, 0)(q)
    torch.testing.assert_close(out, rotation(exact, q, 0)(q))
    expected = exact.rotate_queries_or_keys(q.float())
    torch.testing.assert_close(out.float(), expected, atol=0.02, rtol=0)


@pytest.mark.parametrize("branch_kv", ["shared", "independent"])
def test_biases_and_norms_of_heads(branch_kv):
    """Those of a plain layer on a projection that has them."""
    settings = dict(branch_kv=branch_kv, qkv_bias=True, out_bias=True, qk_norm=True)
    module = layer(**settings, qk_norm_eps=1e-3)
    plain = layer(branch_kv=branch_kv)
    given = module.state_dict()
    plain.load_state_dict({name: given[name] for name in plain.state_dict()})
    x = torch.randn(2, 37, DIM, dtype=torch.float64)

    class Projection(nn.Module):
        def forward(self, x):
            q, *kv = module.to_qkv(x).split(module.qkv_split, dim=-1)
            keys = ((q, module.q_norm.weight), *((k, module.k_norm.weight) for k in kv[::2]))
            q, *ks = (
                F.rms_norm(t.unflatten(-1, (-1, 8)), (8,), eps=1e-3).mul(w).flatten(-2)
                for t, w in keys
            )
            pairs = itertools.chain(*zip(ks, kv[1::2], strict=True))
            return torch.cat((q, *pairs), dim=-1)

    projection = Projection()
    projection.weight = module.to_qkv.weight
    plain.to_qkv = projection
    expected = plain(x) + module.combine_heads.bias
    torch.testing.assert_close(module(x), expected)
    cache = KVCache(64, 2)
    steps = [module(x[:, i : i + 1], cache=cache) for i in range(37)]
    torch.testing.assert_close(torch.cat(steps, 1), expected)
