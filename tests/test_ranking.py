"""The learned ranking of blocks: its loss, what it learns, and where it works; and its recipes."""

import itertools

import pytest
import torch
from rotary_embedding_torch import RotaryEmbedding
from torch.utils.checkpoint import checkpoint

from native_sparse_attention import SparseAttention, Transformer
from native_sparse_attention.recipes import ranking_alone, set_dense
from native_sparse_attention.rotary import rotate
from native_sparse_attention.varlen import layout
from tests.helpers.layers import DIM, TOKENS, layer, normal, projected

INDEX = dict(TOKENS, importance="index", num_local_blocks=1)


def heads_of(module, x):
    """q, k, v, index queries and index keys [b h n d], rotated."""
    q, k, v = projected(module, x)
    index = module.to_index(module.norm(x)).unflatten(-1, (-1, module.index_dim)).transpose(1, 2)
    q, k, index = rotate(module.rotary_emb, [q, k, index])
    return q, k, v, index[:, : module.kv_heads], index[:, module.kv_heads :]


def target_of(module, heads, b, i, r, blocks, weigh):
    """What blocks, of 8 or 4 tokens, are worth to query i of KV head r: the exact attention's mass,
    or how much the output changes without them."""
    q, k, v = heads[:3]
    s, G, worth = module.selection_block_size, module.heads // module.kv_heads, 0
    for h in range(r * G, (r + 1) * G):
        logits = k[b, r, : i + 1] @ q[b, h, i] * module.dim_head**-0.5
        if module.sinks is not None:
            logits = torch.cat((logits, module.sinks[0, h : h + 1]))
        p = logits.softmax(0)[: i + 1]
        parts = [slice(c * s, (c + 1) * s) for c in blocks]
        if weigh == "mass":
            worth = worth + torch.stack([p[part].sum() for part in parts])
        else:
            out = p @ v[b, r, : i + 1]
            changes = [p[part] @ (v[b, r, part] - out) for part in parts]
            worth = worth + torch.stack([change.norm() for change in changes])
    return (worth / worth.sum()).detach()


def divergence(target, scores):
    return (target * (target.log() - scores.log_softmax(0))).sum()


def written_out(module, x, positions, weigh):
    """The loss, block by block."""
    heads, losses = heads_of(module, x), []
    iq, ik = heads[3], heads[4].expand(-1, module.kv_heads, -1, -1)
    for b, i, r in itertools.product(range(len(x)), positions, range(module.kv_heads)):
        blocks = range(i // 8)
        if len(blocks) < 2:
            continue
        scores = ik[b, r] @ iq[b, r, i] * module.index_dim**-0.5
        scores = torch.stack([scores[c * 8 : (c + 1) * 8].max() for c in blocks])
        losses.append(divergence(target_of(module, heads, b, i, r, blocks, weigh), scores))
    return torch.stack(losses).mean()


def test_a_narrow_index_rotates_as_heads_of_its_width():
    module = layer(**INDEX, index_dim=4)
    assert module.dim_head == 8 and module.index_every == 2
    t = normal(2, 3, 37, 4)
    (rotated,) = rotate(module.rotary_emb, [t], 5, every=2)
    expected = RotaryEmbedding(4).rotate_queries_or_keys(t, offset=5)
    torch.testing.assert_close(rotated, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("weigh", ["output", "mass"])
def test_the_loss_written_out(weigh, sinks):
    module, x = layer(**INDEX, attention_sinks=sinks), normal(2, 37, DIM)
    positions = torch.tensor([5, 17, 24, 36])
    out, loss = module(x, ranking_queries=positions, ranking_weights=weigh)
    torch.testing.assert_close(out, module(x))
    expected = written_out(module, x, positions.tolist(), weigh)
    torch.testing.assert_close(loss.double(), expected, atol=1e-6, rtol=1e-5)
    (grad,) = torch.autograd.grad(loss, [module.to_index.weight])
    (right,) = torch.autograd.grad(expected, [module.to_index.weight])
    torch.testing.assert_close(grad, right, atol=1e-6, rtol=1e-4)


def test_blocks_whose_window_is_not_complete_are_no_candidates():
    """Windows of 16 tokens over blocks of 4: the loss is over the blocks that the layer ranks."""
    module = SparseAttention(
        16, dim_head=8, heads=2, kv_heads=1, sliding_window_size=1, num_selected_blocks=8,
        causal=True, branches=("selected",), importance="index", norm=False, rotary_emb=False,
        compress_block_size=16, compress_block_sliding_stride=16, selection_block_size=4,
    )  # fmt: skip
    x = torch.randn(1, 48, 16)
    assert module(x, ranking_queries=torch.tensor([4, 12, 15]))[1] == 0
    heads = heads_of(module, x)
    iq, ik = heads[3][0, 0], heads[4][0, 0]
    for i, count in ((16, 4), (31, 4), (32, 8), (47, 8)):  # of two windows the second ends at 31
        keys = torch.stack([ik[16 * w : 16 * w + 16].mean(0) for w in range(count // 4)])
        scores = (keys @ iq[i] * 8**-0.5).repeat_interleave(4)
        expected = divergence(target_of(module, heads, 0, i, 0, range(count), "output"), scores)
        loss = module(x, ranking_queries=torch.tensor([i]))[1]
        torch.testing.assert_close(loss, expected, atol=1e-5, rtol=0)


def test_the_loss_trains_the_index_alone():
    module, x = layer(**INDEX), normal(1, 40, DIM).requires_grad_()
    with torch.autograd.set_detect_anomaly(True):  # of 40 queries the first have no candidates
        module(x, ranking_queries=40)[1].backward()
    trained = [name for name, p in module.named_parameters() if p.grad is not None]
    assert trained == ["to_index.weight"] and x.grad is None
    out, loss = module(x, ranking_queries=8)
    (out.square().sum() + loss).backward()
    assert all(p.grad is not None for p in module.parameters())


@pytest.mark.parametrize("T", [0, 1, 7, 8])
def test_sequences_without_a_choice_lose_nothing(T):
    """Shorter than a window: no block is a candidate."""
    module = SparseAttention(
        8, 4, 2, 4, 8, 8, 2, causal=True, branches=("selected",), importance="index"
    )
    # rows of padding alone have no position for a query
    padding = dict(segment_ids=torch.zeros(2, T).long(), mask=torch.zeros(2, T).bool())
    none, nowhere = torch.zeros(2, 0).long(), torch.full((2, 1), -1)
    for batch, queries, call in (
        (2, 2, {}), (0, 2, {}), (2, none, {}), (2, nowhere, {}), (2, 2, padding),
        (2, nowhere, padding),
    ):  # fmt: skip
        _, loss = module(torch.randn(batch, T, 8), ranking_queries=queries, **call)
        with torch.autograd.set_detect_anomaly(True):
            loss.backward()
        assert loss == 0 and not module.to_index.weight.grad.any()
        module.zero_grad()


def test_queries_are_drawn_by_the_generator():
    module, x = layer(**INDEX), normal(1, 90, DIM)

    def loss(seed):
        return module(x, ranking_queries=9, generator=torch.Generator().manual_seed(seed))[1]

    assert torch.equal(loss(1), loss(1)) and not torch.equal(loss(1), loss(2))
    every = module(x, ranking_queries=1000)[1]
    for dtype in (torch.uint8, torch.int16, torch.int64):
        positions = torch.arange(90, dtype=dtype)
        torch.testing.assert_close(every, module(x, ranking_queries=positions)[1])


# rows of two documents and of one, the second at a block or not, and padding on the left
ALIGNED, OTHERS = (torch.tensor([[0] * n + [1] * (72 - n), [0] * 72]) for n in (24, 30))
MASK = torch.arange(72) >= torch.tensor([[24], [11]])


@pytest.mark.parametrize(
    "call, ids",
    [({}, 0 * OTHERS), (dict(segment_ids=OTHERS), OTHERS), (dict(mask=MASK), MASK),
     (dict(documents=layout((2, 72), MASK.device, 8, segment_ids=ALIGNED).documents), ALIGNED)],
    ids=["plain", "segment_ids", "mask", "documents"],
)  # fmt: skip
def test_positions_of_each_row(call, ids):
    """[m], and [b m]: the mean over these queries alone, each of its own row, at positions among
    the tokens given and not in rows in which every document begins at a block."""
    module, x = layer(**INDEX), normal(2, 72, DIM)
    for rows in (torch.tensor([[70, -1, 50], [61, 61, 30]]), torch.tensor([70, 50])):
        losses = []
        for b, i in ((b, i) for b, row in enumerate(rows.expand(2, -1)) for i in row if i >= 0):
            own = ids[b] == ids[b, i]  # the document alone
            losses.append(module(x[b, own][None], ranking_queries=own[:i].sum()[None])[1])
        loss = module(x, ranking_queries=rows, **call)[1]
        torch.testing.assert_close(loss, torch.stack(losses).mean(), atol=1e-6, rtol=1e-5)
    with pytest.raises(ValueError, match="positions from 0 to 71"):
        module(x, ranking_queries=torch.tensor([72]), **call)


def test_autocast_and_checkpoint():
    module, x = layer(torch.float32, **INDEX), torch.randn(1, 60, DIM)
    positions = torch.tensor([20, 33, 59])
    _, expected = module(x, ranking_queries=positions)
    with torch.autocast("cpu", torch.bfloat16):
        _, low = module(x, ranking_queries=positions)
    assert low.dtype == torch.float32
    torch.testing.assert_close(low, expected, atol=0.1, rtol=0.1)
    _, loss = checkpoint(module, x, ranking_queries=positions, use_reentrant=False)
    weight = module.to_index.weight
    grads = [torch.autograd.grad(t, weight)[0] for t in (loss, expected)]
    torch.testing.assert_close(*grads)


SETTINGS = dict(TOKENS, selection_block_size=4, num_selected_blocks=1, importance="index")


def model(**settings):
    torch.manual_seed(0)
    given = dict(num_tokens=11, dim=16, depth=3, heads=2, dim_head=8, causal=True)
    return Transformer(**given, use_sparse_attn=True, sparse_attn_kwargs=SETTINGS | settings)


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
