"""Layers of some of the three branches, one softmax, and where it is dense attention."""

import itertools

import pytest
import torch
import torch.nn.functional as F

import native_sparse_attention as nsa
from native_sparse_attention import KVCache, NSAConfig, SparseAttention
from native_sparse_attention.compress import AttentionPool, MeanPool
from native_sparse_attention.ops.branches import TOLD
from native_sparse_attention.rotary import Rotary, rotate
from native_sparse_attention.transformer import Attention
from tests.helpers.layers import DIM, close, layer, normal, projected
from tests.helpers.sizes import sizes

BRANCHES = ("compressed", "selected", "window")
SUBSETS = [some for r in (1, 2, 3) for some in itertools.combinations(BRANCHES, r)]
ONE = dict(branches=("selected",))


def tensors(T=41, H=4, K=2, D=8, d=4):
    q, k, v = normal(2, T, H, D), normal(2, T, K, D), normal(2, T, K, D)
    return dict(q=q, k=k, v=v), dict(ck=normal(2, T // d, K, D), cv=normal(2, T // d, K, D))


SIZES = sizes(8, 4, 8, n=2, w=5)


@pytest.mark.parametrize("backend", ["eager", "flex"])
@pytest.mark.parametrize("branches", SUBSETS, ids=" ".join)
def test_branches_left_out_are_branches_of_gate_0(branches, backend, untraced_flex):
    tokens, compressed = tensors()
    if backend == "flex":  # which has no float64 on a GPU
        tokens, compressed = (
            {n: t.float() for n, t in some.items()} for some in (tokens, compressed)
        )
    gates = torch.rand_like(tokens["q"][..., :3])
    at = [BRANCHES.index(name) for name in branches]
    some = dict(branches=branches, backend=backend)
    if len(at) > 1:
        some["branch_gates"] = gates[..., at]
    if "compressed" in branches or "selected" in branches:
        some["ck"] = compressed["ck"]
    if "compressed" in branches:
        some["cv"] = compressed["cv"]
    found = nsa.native_sparse_attention(**tokens, **SIZES, **some)
    all_gates = torch.zeros_like(gates)
    all_gates[..., at] = gates[..., at] if len(at) > 1 else 1
    expected = nsa.native_sparse_attention(
        **tokens, **compressed, branch_gates=all_gates, **SIZES, backend="eager"
    )
    close(found, expected, 1e-5 if backend == "flex" else 1e-12)


def sorted_names(module):
    return sorted(name for name, _ in module.named_parameters())


def test_one_softmax_has_the_parameters_of_dense_attention():
    module = layer(**ONE)
    assert sorted_names(module) == ["combine_heads.weight", "norm.weight", "to_qkv.weight"]
    dense = Attention(DIM, dim_head=8, heads=4, kv_heads=2)
    assert sum(p.numel() for p in module.parameters()) == sum(p.numel() for p in dense.parameters())
    assert isinstance(module.k_compress, MeanPool) and module.to_strategy_combine is None


def test_networks_that_only_rank():
    """A network learns only through gates of differentiable top-k; then it has positions too."""
    for given in (AttentionPool(8, 8), None):
        if given is not None:
            with pytest.raises(ValueError, match="compress_mlp must have no parameters to train"):
                layer(**ONE, compress_mlp=given)
        module = layer(**ONE, compress_mlp=given, use_diff_topk=True)
        module(normal(1, 65, DIM)).square().sum().backward()
        learned = [n for n in sorted_names(module) if "compress" in n or "intrablock" in n]
        wanted = ["k_compress.to_attn_logits.weight", "k_intrablock_positions"]
        assert learned == (wanted if given is not None else [])
        assert all(p.grad is not None and p.grad.any() for p in module.parameters())
    frozen = AttentionPool(8, 8).requires_grad_(False)
    assert layer(**ONE, compress_mlp=frozen).k_intrablock_positions is None


def rotated(t):
    return rotate(Rotary(t.shape[-1]), [t])[0]


def as_dense(module, x):
    """Dense attention with the weights of a layer."""
    q, k, v = projected(module, x)
    q, k = map(rotated, (q, k))
    out = F.scaled_dot_product_attention(q, k, v, is_causal=module.causal, enable_gqa=True)
    return module.combine_heads(out.transpose(1, 2).flatten(2))


@pytest.mark.parametrize(
    "settings, length, is_sdpa",
    [
        *((dict(num_selected_blocks=3), length, length <= 32) for length in (1, 8, 23, 32, 33)),
        (dict(num_selected_blocks=3, backend="flex"), 32, True),
        (dict(num_selected_blocks=3, causal=False, num_initial_blocks=1), 32, True),
        (dict(dense_length=64), 64, True),
        (dict(dense_length=64, soft_cap=4.0), 64, False),
        (dict(num_selected_blocks=3, num_local_blocks=0), 24, False),
        (dict(num_selected_blocks=3, use_diff_topk=True), 24, False),
    ],
)
@torch.no_grad()
def test_dense_attention_runs_through_sdpa(settings, length, is_sdpa, monkeypatch):
    seen, sdpa = [], F.scaled_dot_product_attention
    spy = lambda *args, **kwargs: seen.append(args) or sdpa(*args, **kwargs)  # noqa: E731
    monkeypatch.setattr(F, "scaled_dot_product_attention", spy)
    module, x = layer(torch.float32, **ONE | settings), torch.randn(1, length, DIM)
    expected = module(x)
    assert bool(seen) == is_sdpa
    if is_sdpa:
        close(expected, as_dense(module, x), 1e-5)
    seen.clear()
    if not module.causal:
        return
    torch.testing.assert_close(module(x, cache=KVCache()), expected)
    assert bool(seen) == is_sdpa


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        (dict(dense_length=64), r"dense up to 64 tokens \(dense_length\), sparse for longer"),
        (dict(num_selected_blocks=3), r"dense up to 32 tokens \(the blocks cover them\)"),
    ],
)
@pytest.mark.filterwarnings("error")
def test_dense_attention_is_told_once(settings, reason):
    """For whole sequences in eager mode, to who has not asked for it."""
    module, x = layer(torch.float32, **ONE | settings), torch.randn(1, 70, DIM)
    TOLD.clear()
    with pytest.warns(nsa.DenseAttentionWarning, match=reason) as told:
        module(x[:, :30])
        module(x[:, :20])
    assert len(told) == 1
    TOLD.clear()
    with pytest.warns(nsa.DenseAttentionWarning, match=reason):
        cache = module(x[:, :20], return_cache=True)[1]
    TOLD.clear()
    module(x[:, 20:21], cache=cache)
    module(x)
    if "dense_length" in settings:
        torch.compile(module, backend="eager", fullgraph=True)(x[:, :30])
    layer(torch.float32, **ONE, num_selected_blocks=0)(x[:, :8])
    module.dense = True
    module(x[:, :30])


def test_repr_shows_what_a_layer_computes():
    shown = repr(layer(**ONE, dense_length=64, importance="max"))
    assert "branches=('selected',), importance='max', dense_length=64, " in shown
    assert "window=" not in shown and "window=5, " in repr(layer())


@pytest.mark.parametrize("settings", [{}, dict(soft_cap=2.0), dict(attention_sinks=True)], ids=str)
def test_dense_length(settings):
    """Queries before it see all keys before them, the others their blocks. Packed and over caches
    it is one of the settings of every law."""
    module, length = layer(**ONE, dense_length=20, num_selected_blocks=1, **settings), 53
    sparse, dense = (layer(**ONE, num_selected_blocks=1, **settings) for _ in range(2))
    for other in (sparse, dense):
        other.load_state_dict(module.state_dict())
    dense.dense = True
    x = normal(2, length, DIM)
    expected = torch.cat((dense(x)[:, :20], sparse(x)[:, 20:]), dim=1)
    assert (dense(x) - sparse(x))[:, 20:].abs().max() > 1e-3
    close(module(x), expected)
    close(module(x[:, :20]), dense(x[:, :20]))


def test_dense_length_of_sequences_without_an_order():
    module = layer(**ONE, dense_length=20, num_selected_blocks=0, causal=False)
    x = normal(1, 50, DIM)
    close(module(x[:, :20]), as_dense(module, x[:, :20]))
    assert (module(x) - as_dense(module, x)).abs().max() > 1e-3
    out = module(x, cu_seqlens=torch.tensor([0, 30, 50]))
    close(out[:, 30:], as_dense(module, x[:, 30:]))
    close(out[:, :30], module(x[:, :30]))


def test_dense_at_run_time():
    module, x = layer(**ONE), normal(2, 60, DIM)
    before = module(x)
    module.dense = True
    close(module(x), as_dense(module, x))
    with torch.no_grad():
        out, cache = module(x[:, :31], return_cache=True)
        close(torch.cat((out, module(x[:, 31:], cache)), dim=1), as_dense(module, x))
    module.dense = False
    close(module(x), before)
    other = layer()
    with pytest.raises(ValueError, match=r"dense goes with branches=\('selected',\) only"):
        other.dense = True
    with pytest.raises(ValueError, match="dense must be True or False"):
        module.dense = 2


def test_ranking_on_rotated_keys():
    module = layer(**ONE, rank_rotated=True)
    x = normal(1, 70, DIM)
    q, k, v = projected(module, x)
    q, k = map(rotated, (q, k))
    windows = F.pad(k, (0, 0, 4, 0)).unfold(2, 8, 4).mean(-1)
    tensors = (t.transpose(1, 2) for t in (q, k, v, windows))
    out = nsa.native_sparse_attention(*tensors, **SIZES, **ONE)
    close(module(x), module.combine_heads(out.flatten(2)))


@pytest.mark.parametrize("branches", SUBSETS[3:], ids=" ".join)
def test_gates_begin_at_the_window(branches):
    module = SparseAttention(DIM, 8, 4, 5, 8, 8, 2, branches=branches)
    others = -2.0 if "window" in branches else 0.0
    start = torch.tensor([2.0 if name == "window" else others for name in branches]).sigmoid()
    close(module.to_strategy_combine(torch.randn(1, 1, DIM))[0, 0, 0], start, 1e-6)
    module.to_strategy_combine[0].bias.data.zero_()
    module.reset_gate()
    close(module.to_strategy_combine(torch.randn(1, 1, DIM))[0, 0, 0], start, 1e-6)


WEIGHTS = [
    (ONE, "branches", ("selected", "window")), (ONE, "importance", "index"),
    (dict(ONE, importance="index"), "index_heads", 2),
    (dict(ONE, importance="index"), "rank_rotated", True),
    (dict(ONE, num_selected_blocks=0), "num_selected_blocks", 2),
    ({}, "dim", 2 * DIM), ({}, "kv_heads", 1), ({}, "branch_kv", "independent"),
    ({}, "attention_sinks", True), ({}, "num_compressed_mem_kv", 5),
    ({}, "compress_mlp_expand_factor", 0.5), ({}, "compress_block_size", 4),
]  # fmt: skip


@pytest.mark.parametrize("settings, name, value", WEIGHTS)
def test_settings_that_weights_depend_on(settings, name, value):
    module = layer(**settings)
    before = module.config
    with pytest.raises(ValueError, match=f"{name} must stay"):
        setattr(module, name, value)
    assert module.config is before
    setattr(module, name, getattr(before, name))
    module.num_selected_blocks = 0
    module(normal(1, 30, DIM))


def test_config_keeps_the_order_of_branches():
    config = NSAConfig(dim=DIM, dim_head=8, heads=4, branches=["window", "selected"])
    assert config.branches == ("selected", "window")
    module = SparseAttention.from_config(config)
    assert module.config == config and module.branches == config.branches
