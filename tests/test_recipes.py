"""Dense layers, and steps of the ranking alone."""

import pytest
import torch

from native_sparse_attention import Transformer, recipes
from native_sparse_attention.recipes import ranking_alone, set_dense

SETTINGS = dict(
    branches=("selected",), compress_block_size=1, compress_block_sliding_stride=1,
    selection_block_size=4, num_selected_blocks=1, rank_rotated=True, importance="index",
)  # fmt: skip


def model(**settings):
    torch.manual_seed(0)
    given = dict(num_tokens=11, dim=16, depth=3, heads=2, dim_head=8, causal=True)
    return Transformer(**given, use_sparse_attn=True, sparse_attn_kwargs=SETTINGS | settings)


def dense_of(net):
    return [layer.dense for layer in recipes.sparse_layers(net)]


def test_dense_layers():
    net, ids = model(importance="max"), torch.randint(11, (2, 40))
    sparse = net(ids)
    set_dense(net, True)
    dense = net(ids)
    assert dense_of(net) == [True] * 3 and not torch.allclose(sparse, dense, atol=1e-3)
    set_dense(net, False)
    assert dense_of(net) == [False] * 3 and torch.equal(net(ids), sparse)


@pytest.mark.parametrize("dense", [False, True])
def test_the_ranking_learns_alone(dense):
    """Only its weights get gradients and change, and its loss falls."""
    net, ids = model(), torch.randint(11, (2, 48))
    frozen = net.token_emb.weight
    frozen.requires_grad_(False)
    before = {name: p.detach().clone() for name, p in net.named_parameters()}
    set_dense(net, dense)
    losses = []
    with ranking_alone(net) as learned:
        optimizer = torch.optim.Adam(learned, lr=3e-2)
        for _ in range(15):
            loss, ranking = net(ids, return_loss=True, ranking_queries=48)
            assert not loss.requires_grad
            optimizer.zero_grad()
            ranking.backward()
            optimizer.step()
            losses.append(ranking.item())
    assert losses[-1] < 0.8 * losses[0]
    changed = {name for name, p in net.named_parameters() if not torch.equal(p, before[name])}
    assert changed == {name for name in before if "to_index" in name}
    with pytest.raises(RuntimeError, match="stop"), ranking_alone(net):
        raise RuntimeError("stop")
    assert not frozen.requires_grad
    assert all(p.requires_grad for p in net.parameters() if p is not frozen)


def test_refusals():
    three = model(branches=("compressed", "selected", "window"), importance="logits",
                  rank_rotated=False, sliding_window_size=4)  # fmt: skip
    for call, message in (
        (lambda: set_dense(three, True), r"branches=\('selected',\), got none in a Transformer"),
        (lambda: ranking_alone(three).__enter__(), "importance='index', got none in a Transformer"),
        (lambda: set_dense("model", True), "model must be an nn.Module, got 'model'"),
        (lambda: ranking_alone(None).__enter__(), "model must be an nn.Module, got None"),
        (lambda: set_dense(model(), "False"), "dense must be"),
    ):
        with pytest.raises(ValueError, match=message):
            call()
