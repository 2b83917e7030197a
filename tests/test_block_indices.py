"""Block indices that a caller gives in place of a ranking, and gets back: the same indices give the
same bits, through functions, layers, caches and decode kernels, and for layers that share them."""

import pytest
import torch

import native_sparse_attention as nsa
from native_sparse_attention import NSAConfig, SparseAttention, Transformer
from native_sparse_attention.ops.decode import decode_attention
from tests.helpers import calls
from tests.helpers.budget import CUDA, DEVICE
from tests.helpers.sizes import sizes
from tests.kernels.decode import test_decode

pytestmark = pytest.mark.usefixtures("untraced_flex")
kernels = pytest.mark.kernels
BACKENDS = ["eager", "flex", pytest.param("triton", marks=kernels)]
FORMS = {
    "plain": {},
    "groups": dict(selection_stride=4, place=(17, 29)),
    "initial": dict(num_initial_blocks=1),
    "documents": dict(lengths=calls.DOCUMENTS),
    "own rankings": dict(query_heads_share_selected_kv=False),
    "interpolated": dict(interpolated_importance_score=True),
}


def given(call, indices, backend, **changes):
    """The call without a ranking."""
    is_single = call.settings.get("branches") == ("selected",)
    tensors = {n: t for n, t in call.tensors.items() if not is_single or n not in ("ck", "cq")}
    settings = call.settings | dict(block_indices=indices, backend=backend) | changes
    return call.op(**tensors, **settings)


@pytest.mark.slow(one_of=9)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", calls.LAYERS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_the_same_indices_give_the_same_bits(backend, kind, form):
    call = calls.draw(kind, batch=2 if CUDA else 1, **FORMS[form])
    has_gradients = backend != "flex" or CUDA
    call = call.leaves() if has_gradients else call
    out, indices = call(backend, return_block_indices=True)
    again, same = given(call, indices, backend, return_block_indices=True)
    assert torch.equal(out, again) and torch.equal(indices, same)
    if not has_gradients:
        return
    (names, leaves), weights = zip(*call.tensors.items()), torch.randn_like(out)
    grads = [
        torch.autograd.grad((o * weights).sum(), leaves, materialize_grads=True)
        for o in (out, again)
    ]
    for name, *pair in zip(names, *grads):
        assert torch.equal(*pair), name


@pytest.mark.slow(one_of=4)
@pytest.mark.parametrize("s", [4, 16, 32, 64, 128])
@pytest.mark.parametrize("kind", calls.LAYERS)
@pytest.mark.parametrize("backend", BACKENDS[1:])
def test_one_head_of_any_indices(backend, kind, s):
    """Those of one head for all, in int64: some of the future, some missing, some twice, some below
    -1. They come back as they were given."""
    place = (7, 2 * s + 9)
    windows = dict(compress_block_size=4, compress_block_sliding_stride=4)
    call = calls.draw(kind, selection_block_size=s, place=place, **windows)
    indices = torch.randint(-7, 4, (2, 7, 1, 9), device=DEVICE)
    found, back = given(call, indices, backend, return_block_indices=True)
    assert torch.equal(back, indices.expand_as(back))
    expected = given(call, indices.expand(-1, -1, calls.HEADS[0], -1), "eager")
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


@kernels
@pytest.mark.parametrize(
    "case", ["plain", "one softmax, pages, sinks", "rankings of groups", "interpolated, one head"]
)
@pytest.mark.parametrize("backend", ["eager", "triton"])
def test_steps(backend, case):
    changes = {name: v for name, v in test_decode.CASES[case].items() if name != "integers"}
    tensors, settings = test_decode.problem(torch.float32, **changes)
    settings["counts"] = torch.tensor([2, 1], device=DEVICE)[: len(settings["lengths"])]
    settings |= dict(return_block_indices=True, backend=backend)
    ring = test_decode.ring(settings, changes.get("heads", (2, 1)), tensors["q"].shape[1])
    is_shared = settings.get("selection_stride", 1) > 1
    out, indices = decode_attention(**tensors, **settings, ranking=ring if is_shared else None)
    if tensors["branch_gates"] is None:
        tensors |= dict(ck=None, cq=None)
    again, same = decode_attention(**tensors, **settings, block_indices=indices)
    assert torch.equal(indices, same)
    # where a short cache is read whole, blocks are reduced in another order
    torch.testing.assert_close(again, out, atol=1e-6, rtol=1e-5)


def config_of(**changes):
    sizes = dict(selection_block_size=8, num_selected_blocks=2, num_initial_blocks=1)
    sizes |= dict(dim=32, dim_head=16, heads=4, kv_heads=2, num_local_blocks=1, causal=True)
    return NSAConfig.preset("one-softmax", 1024, **sizes | dict(dense_length=0) | changes)


SETTINGS = {
    "tokens": {},
    "groups": dict(selection_stride=4),
    "dense begin": dict(dense_length=24),
    "index": dict(importance="index"),
    "8 bits": dict(ranking_bits=8),
    "4 bits": dict(ranking_bits=4, selection_block_size=16),
    "two stages": sizes(2, 2, 4, num_local_blocks=4, num_selected_groups=1),
    "three branches": sizes(
        8, 4, w=11, branches=("compressed", "selected", "window"), importance="logits",
        rank_rotated=False,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SETTINGS)
@torch.no_grad()
def test_layer(name):
    """Whole, packed and over a cache it selects the same blocks, given or not."""
    layer = SparseAttention.from_config(config_of(**SETTINGS[name])).to(DEVICE)
    x, close = torch.randn(2, 70, 32, device=DEVICE), dict(atol=1e-5, rtol=1e-5)
    out, indices = layer(x, return_block_indices=True)
    assert torch.equal(layer(x, block_indices=indices), out) and (indices >= 0).any()
    cu = torch.tensor([0, 29, 70])
    packed, of_documents = layer(x[:1], cu_seqlens=cu, return_block_indices=True)
    assert of_documents.max() <= 40 // layer.selection_block_size
    assert torch.equal(layer(x[:1], cu_seqlens=cu, block_indices=of_documents), packed)
    alone = [layer(x[:1, :29]), layer(x[:1, 29:])]
    torch.testing.assert_close(packed, torch.cat(alone, 1), **close)
    bounds = (0, 33), (33, 34), (34, 70)
    cache = nsa.PagedKVCache(32, 8, 2, 96)
    steps = [layer(x[:, a:b], cache=cache, return_block_indices=True) for a, b in bounds]
    outs, rankings = (torch.cat(parts, 1) for parts in zip(*steps))
    assert torch.equal(rankings, indices)
    torch.testing.assert_close(outs, out, **close)
    if layer.config.leader_stride > 1:
        return
    cache = nsa.KVCache()
    parts = [layer(x[:, a:b], cache=cache, block_indices=indices[:, a:b]) for a, b in bounds]
    torch.testing.assert_close(torch.cat(parts, 1), out, **close)
    mask = torch.ones(2, 37, dtype=torch.bool, device=DEVICE)
    mask[0, -3:] = False
    cache = nsa.KVCache()
    layer(x[:, :33], cache=cache)
    part = layer(x[:, 33:], cache=cache, mask=mask, block_indices=indices[:, 33:])
    torch.testing.assert_close(part[mask], out[:, 33:][mask], **close)


def test_a_layer_that_ranks_nothing():
    layer = SparseAttention.from_config(config_of(importance="given")).to(DEVICE)
    assert layer.k_compress is None and layer.to_index is None
    x, indices = torch.randn(1, 50, 32, device=DEVICE), torch.full((1, 50, 1, 2), -1, device=DEVICE)
    forced = layer(x, block_indices=indices)
    assert not torch.equal(forced, layer(x, block_indices=indices.clamp(min=1)))
    layer.dense = True
    assert torch.equal(layer(x), layer(x, block_indices=indices))
    # without the selected branch nothing is given
    window = config_of(importance="given", branches=("window",), sliding_window_size=3)
    layer, cache = SparseAttention.from_config(window).to(DEVICE), nsa.KVCache()
    steps = [layer(part, cache=cache) for part in x.split(20, dim=1)]
    torch.testing.assert_close(layer(x), torch.cat(steps, 1), atol=1e-5, rtol=1e-5)


@pytest.mark.slow(one_of=2)
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("name", SETTINGS)
def test_layers_that_share_a_ranking(name, recompute):
    """Layers 1, 4 and 5 read what the layer before them ranked: the loss and its gradients, packed
    documents, and a cache, also of no rows."""
    shared = dict(share_ranking=[0, 3], local_layers=[2], activation_checkpointing=recompute)
    net = Transformer(64, 32, 6, config=config_of(**SETTINGS[name]), **shared).to(DEVICE)
    rules = [attention.importance == "given" for attention, _ in net.layers]
    assert rules == [False, True, False, False, True, True]
    ids = torch.randint(0, 64, (2, 70), device=DEVICE)

    def by_hand():
        x, indices = net.token_emb(ids), None
        for i, (attention, ff) in enumerate(net.layers):
            if i in (0, 3):
                out, indices = attention(x, return_block_indices=True)
            else:
                out = attention(x, **({} if i == 2 else dict(block_indices=indices)))
            x = x + out
            x = x + ff(x)
        return net.to_logits(net.norm(x))

    logits = net(ids)
    assert torch.equal(logits, by_hand())
    grads = [
        torch.autograd.grad(t.square().sum(), net.token_emb.weight)[0] for t in (logits, by_hand())
    ]
    torch.testing.assert_close(*grads, atol=1e-4, rtol=1e-4)
    with torch.no_grad():
        cache, bounds = net.new_cache(), ((0, 33), (33, 34), (34, 70))
        parts = [net(ids[:, a:b], cache=cache) for a, b in bounds]
        torch.testing.assert_close(torch.cat(parts, 1), logits, atol=1e-4, rtol=1e-4)
        cache = net.new_cache()
        assert all(net(ids[:0, a:b], cache=cache).shape == (0, b - a, 64) for a, b in bounds)
        packed = net(ids[:1], cu_seqlens=torch.tensor([0, 29, 70]))
        torch.testing.assert_close(packed[:, 29:], net(ids[:1, 29:]), atol=1e-4, rtol=1e-4)


def test_layers_that_cannot_share():
    for layers in ([1], [0, 2], []):
        with pytest.raises(ValueError, match="share_ranking must begin with layer 0 and leave out"):
            Transformer(9, 32, 4, config=config_of(), share_ranking=layers, local_layers=[2])
    for changes in ({}, dict(config=config_of(branches=("window",), sliding_window_size=3))):
        with pytest.raises(ValueError, match="share_ranking must be None"):
            Transformer(9, 32, 4, share_ranking=[0], **changes)
