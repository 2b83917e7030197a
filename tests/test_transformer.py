"""The language model: both kinds of attention, loss, packing, caches, checkpointing."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from native_sparse_attention import NSAConfig, Transformer
from native_sparse_attention.compress import GroupedMLP
from native_sparse_attention.presets import RECOMMENDED
from native_sparse_attention.transformer import DEFAULT_SPARSE_ATTN
from tests.helpers.layers import close, randomize

SHAPE = dict(num_tokens=32, dim=16, depth=2, dim_head=8, heads=2, kv_heads=1)
both = pytest.mark.parametrize("use_sparse_attn", [True, False])


def model(use_sparse_attn=True, **kwargs):
    """Of the published form if sparse."""
    sizes = dict(sparse_attn_kwargs={}) if use_sparse_attn and "config" not in kwargs else {}
    kwargs = SHAPE | sizes | kwargs
    return randomize(Transformer(**kwargs, use_sparse_attn=use_sparse_attn)).double()


def tokens(*shape):
    return torch.randint(0, SHAPE["num_tokens"], shape)


@both
def test_loss(use_sparse_attn):
    """With a cache too, and with activation checkpointing."""
    net, ids = model(use_sparse_attn), tokens(2, 30)
    logits = net(ids[:, :-1])
    expected = F.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten())
    loss = net(ids, return_loss=True)
    torch.testing.assert_close(loss, expected)
    grads = torch.autograd.grad(loss, list(net.parameters()))
    net.activation_checkpointing = True
    other = torch.autograd.grad(net(ids, return_loss=True), list(net.parameters()))
    torch.testing.assert_close(other, grads)
    with torch.no_grad():
        loss, cache = net(ids, return_loss=True, return_cache=True)
        torch.testing.assert_close(loss, expected)
        torch.testing.assert_close(net(ids[:, -1:], cache=cache), net(ids)[:, -1:])


@both
@pytest.mark.parametrize("causal", [True, False])
def test_documents_and_padding(use_sparse_attn, causal):
    """Each text is what it is alone; what follows a document is not predicted."""
    net, lengths = model(use_sparse_attn, causal=causal), [13, 0, 1, 32, 5]
    ids, bounds = tokens(1, sum(lengths)), torch.tensor([0, *lengths]).cumsum(0)
    parts = ids.split(lengths, 1)
    close(net(ids, cu_seqlens=bounds), torch.cat([net(t) for t in parts], 1))
    if not causal:
        return
    losses = [net(t, return_loss=True) * (t.shape[1] - 1) for t in parts if t.shape[1] > 1]
    expected = sum(losses) / sum(n - 1 for n in lengths if n > 1)
    close(net(ids, return_loss=True, cu_seqlens=bounds), expected, 1e-6)  # losses are float32
    assert net(ids[:, :2], return_loss=True, cu_seqlens=torch.tensor([0, 1, 2])) == 0

    net.activation_checkpointing = True
    ids, mask = tokens(2, 20), torch.ones(2, 20, dtype=torch.bool)
    mask[0, :7] = mask[1, 15:] = False
    logits, (cached, _) = net(ids, mask=mask), net(ids, mask=mask, return_cache=True)
    for row in range(2):
        alone = net(ids[row : row + 1, mask[row]])[0]
        close(logits[row, mask[row]], alone)
        close(cached[row, mask[row]], alone)
    net(ids, mask=mask, return_loss=True).backward()


def test_settings_of_layers():
    """Of a preset, of a config, or of the published form."""
    shape = dict(dim=16, dim_head=8, heads=2, kv_heads=1, causal=True)
    preset = NSAConfig.preset(RECOMMENDED, **shape)
    paper = NSAConfig.preset("paper", 1024, **shape, scale=0.3)
    published = NSAConfig(**shape, **DEFAULT_SPARSE_ATTN)
    assert [*DEFAULT_SPARSE_ATTN.values()] == [32, 8, 4, 8, 4]
    l, d, s = "compress_block_size", "compress_block_sliding_stride", "selection_block_size"
    partial = [({l: 4}, 4), ({l: 16}, 16), ({s: 16}, 4), ({d: 2}, 2)]
    for kwargs, expected in (
        *((dict(sparse_attn_kwargs=given), replace(published, **given | {d: stride}))
          for given, stride in partial),
        ({}, preset), (dict(config=RECOMMENDED), preset), (dict(sparse_attn_kwargs={}), published),
        (dict(config=paper), paper), (dict(config=paper, dim_head=64, heads=8), paper),
        (dict(use_flex_sliding_window=True), published),
    ):  # fmt: skip
        net = Transformer(**SHAPE | dict(use_sparse_attn="config" not in kwargs) | kwargs)
        assert net.use_sparse_attn and [layer[0].config for layer in net.layers] == [expected] * 2
    with pytest.warns(UserWarning, match="sparse_attn_kwargs are not used"):
        Transformer(**SHAPE, sparse_attn_kwargs={})
    for kwargs, message in (
        (dict(config="papers"), "config must be"), (dict(config=3), "config must be"),
        (dict(config=paper, sparse_attn_kwargs={}), "config and sparse_attn_kwargs are two ways"),
        (dict(config=paper, dim=32), "dim must be that of config, 16, got 32"),
        (dict(config=paper, heads=2.0), "heads must be an integer"),
        (dict(config=paper, dim_head=torch.ones(2)), "dim_head must be an integer"),
        (dict(config=paper, causal=False), "causal must be that of config, True, got False"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            Transformer(**SHAPE | kwargs)


@both
def test_tensors_without_data(use_sparse_attn):
    """Shapes of losses, packed or not, and of every form of cache."""
    with torch.device("meta"):
        net = Transformer(64, 32, 2, 8, 4, use_sparse_attn=use_sparse_attn)
        ids = torch.zeros(1, 33, dtype=torch.long)
        for call in (
            {},
            dict(cu_seqlens=torch.zeros(4, dtype=torch.int32)),
            dict(segment_ids=ids, mask=torch.ones(1, 33, dtype=torch.bool)),
        ):
            assert net(ids, **call).shape == (1, 33, 64)
            net(ids, return_loss=True, **call).backward()
        assert all(p.grad.is_meta for p in net.parameters())
        fixed = dict(max_length=64, batch=1)
        for storage in ({}, fixed, fixed | dict(page_size=64, num_pages=2)):
            cache = net.requires_grad_(False).new_cache(**storage)
            for n in (33, 1):
                assert net(ids[:, :n], cache=cache).shape == (1, n, 64)


@pytest.mark.parametrize("form", [None, {}, dict(branches=("selected",), importance="index")])
def test_no_label_counts(form):
    """The loss and its gradients are 0."""
    net, ids = model(use_sparse_attn=form is not None, sparse_attn_kwargs=form), tokens(2, 9)
    each, none = torch.arange(9).expand(2, -1), torch.zeros(2, 9, dtype=torch.bool)
    for rows, call in (
        (ids, dict(segment_ids=each)), (ids, dict(mask=none)), (ids, dict(mask=each < 1)),
        (ids[:0], {}), (ids[:, :1], {}), (ids[:, :0], {}),
        (ids[:1, :0], dict(cu_seqlens=each[0, :1])),
    ):  # fmt: skip
        ranking = dict(ranking_queries=4) if form and "importance" in form else {}
        with torch.autograd.set_detect_anomaly(True):
            losses = net(rows, return_loss=True, **call, **ranking)
            losses = torch.stack(losses) if ranking else losses
            losses.sum().backward()
        assert not losses.any() and not any(p.grad.any() for p in net.parameters())
        net.zero_grad()


def test_each_layer_has_a_gate_of_its_own():
    kwargs = {**DEFAULT_SPARSE_ATTN, "strategy_combine_mlp": torch.nn.Linear(16, 6)}
    first, second = (attn for attn, _ in model(sparse_attn_kwargs=kwargs).layers)
    assert first.to_strategy_combine[0] is not second.to_strategy_combine[0]


def test_local_layers_rank_nothing():
    shape = dict(dim=16, dim_head=8, heads=2, num_tokens=16, depth=3, use_sparse_attn=True)
    sparse = dict(branches=("selected",), importance="index", num_local_blocks=1)
    net = Transformer(**shape, local_layers=[-1, 0], sparse_attn_kwargs=sparse)
    assert [attn.config.ranks for attn, _ in net.layers] == [False, True, False]
    assert [attn.to_index is None for attn, _ in net.layers] == [True, False, True]
    ids = torch.randint(0, 16, (2, 60))
    logits, cache = net(ids[:, :41], return_cache=True)
    steps = [net(ids[:, i : i + 1], cache=cache) for i in range(41, 60)]
    torch.testing.assert_close(torch.cat((logits, *steps), 1), net(ids), atol=1e-5, rtol=1e-5)
    net.activation_checkpointing = True
    loss, ranking = net(ids, return_loss=True, ranking_queries=8)
    (loss + ranking).backward()
    assert all(p.grad is not None for p in net.parameters()) and ranking > 0
    torch.testing.assert_close(net(ids, return_loss=True), loss)
    generators = [torch.Generator().manual_seed(seed) for seed in (3, 3, 4)]
    drawn = [net(ids, return_loss=True, ranking_queries=8, generator=g)[1] for g in generators]
    assert drawn[0] == drawn[1] != drawn[2]
    _, packed = net(ids[:1], cu_seqlens=torch.tensor([0, 25, 60]), ranking_queries=8)
    assert packed.isfinite() and packed > 0
    mask = torch.ones(2, 60, dtype=torch.bool)
    mask[1, :25] = False
    out, _ = net(ids, mask=mask, ranking_queries=8)
    torch.testing.assert_close(out[1, 25:], net(ids[1:, 25:])[0], atol=1e-5, rtol=1e-5)
    # a network that only ranks is left out where nothing is ranked
    sparse = dict(branches=("selected",), importance="probs", use_diff_topk=True)
    sparse |= dict(selection_block_size=4, compress_block_size=4, compress_mlp=GroupedMLP(8, 4, 2))
    net = Transformer(**shape, local_layers=[0], sparse_attn_kwargs=sparse)
    assert [attn.k_compress is None for attn, _ in net.layers] == [True, False, False]


def test_flex_masks(untraced_flex):
    kwargs = dict(use_flex_sliding_window=True, use_flex_fine_selection=True)
    net, plain, ids = model(**kwargs), model(), tokens(2, 37)
    plain.load_state_dict(net.state_dict())
    with torch.no_grad():
        torch.testing.assert_close(net(ids), plain(ids))
        torch.testing.assert_close(net(ids, disable_flex=True), plain(ids))
