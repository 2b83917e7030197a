"""The language model: both kinds of attention, loss, checkpointing, sampling."""

import re

import pytest
import torch
import torch.nn.functional as F

from native_sparse_attention import Transformer
from native_sparse_attention.compress import GroupedMLP
from native_sparse_attention.generate import sample_token
from native_sparse_attention.transformer import DEFAULT_SPARSE_ATTN, Attention
from tests.helpers.layers import randomize

SHAPE = dict(num_tokens=32, dim=16, depth=2, dim_head=8, heads=2, kv_heads=1)


def model(use_sparse_attn=True, **kwargs):
    return randomize(Transformer(**{**SHAPE, **kwargs}, use_sparse_attn=use_sparse_attn)).double()


def tokens(*shape):
    return torch.randint(0, SHAPE["num_tokens"], shape)


both = pytest.mark.parametrize("use_sparse_attn", [True, False])


@both
@pytest.mark.parametrize("causal", [True, False])
def test_default_construction(use_sparse_attn, causal):
    net = Transformer(
        num_tokens=32, dim=16, depth=1, use_sparse_attn=use_sparse_attn, causal=causal
    )
    for length in (1, 2, 9, 40):
        assert net(tokens(2, length)).shape == (2, length, 32)


def test_bad_arguments_of_dense_attention():
    attn, x = Attention(16, 8, 2), torch.randn(1, 6, 16)
    for given, message in [
        (dict(x="x"), "^x must be a tensor of floating dtype, got str"),
        (dict(x=x, documents=5), "^documents must be varlen.Documents, got int"),
        (dict(x=x, return_cache="no"), "^return_cache must be"),
        (dict(x=x, disable_triton_kernel=2), "^disable_triton_kernel must be"),
    ]:
        with pytest.raises(ValueError, match=message):
            attn(**given)


@both
def test_an_embedding_in_a_wrapper(use_sparse_attn):
    class Wrapper(torch.nn.Module):
        def __init__(self, base):
            super().__init__()
            self.base = base

        def forward(self, ids):
            return self.base(ids)

    net, ids = model(use_sparse_attn), tokens(2, 9)
    expected, sampled = net(ids), net.sample(ids, 12, temperature=0.0, stop_tokens=3)
    net.token_emb = Wrapper(net.token_emb)
    torch.testing.assert_close(net(ids), expected)
    assert torch.equal(net.sample(ids, 12, temperature=0.0, stop_tokens=3), sampled)


@both
def test_loss(use_sparse_attn):
    net = model(use_sparse_attn)
    ids = tokens(2, 30)
    logits = net(ids[:, :-1])
    expected = F.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten())
    torch.testing.assert_close(net(ids, return_loss=True), expected)


@both
def test_activation_checkpointing(use_sparse_attn):
    net = model(use_sparse_attn)
    ids = tokens(2, 30)
    grads = []
    for checkpointing in (False, True):
        net.activation_checkpointing = checkpointing
        net.zero_grad()
        net(ids, return_loss=True).backward()
        grads.append([p.grad.clone() for p in net.parameters()])
    torch.testing.assert_close(grads[1], grads[0])


@both
def test_cache(use_sparse_attn):
    """Chunks are one forward; rows of different lengths go on where they are."""
    net = model(use_sparse_attn)
    ids = tokens(3, 33)
    with torch.no_grad():
        expected = net(ids)
        cache = net.new_cache(max_length=40)
        outs = [net(part, cache=cache) for part in ids.split([11, 1, 1, 15, 5], dim=1)]
        torch.testing.assert_close(torch.cat(outs, dim=1), expected)

        prompt = torch.where(torch.arange(20) < torch.tensor([[20], [7], [13]]), ids[:, :20], 0)
        _, cache = net(prompt, return_cache=True, lengths=[20, 7, 13])
        step = torch.stack([ids[row, n : n + 6] for row, n in enumerate((20, 7, 13))])
        out = net(step, cache=cache)
        for row, n in enumerate((20, 7, 13)):
            torch.testing.assert_close(out[row], expected[row, n : n + 6])


@pytest.mark.slow(one_of=3)
@both
@pytest.mark.parametrize("prompt_length", [1, 9, 20])
def test_greedy_cached_is_greedy_uncached(use_sparse_attn, prompt_length):
    net = model(use_sparse_attn)
    prompt = tokens(3, prompt_length)
    cached = net.sample(prompt, 40, temperature=0.0)
    uncached = net.sample(prompt, 40, temperature=0.0, use_cache_kv=False)
    assert cached.shape == (3, 40 - prompt_length)
    assert torch.equal(cached, uncached)
    # a prompt alone is the prompt in its batch
    assert torch.equal(net.sample(prompt[1:2], 40, temperature=0.0), cached[1:2])


@both
def test_sampling_repeats_with_its_generator(use_sparse_attn):
    net = model(use_sparse_attn)
    prompt = tokens(2, 5)
    state = torch.get_rng_state()
    texts = [
        net.sample(prompt, 30, top_p=0.9, generator=torch.Generator().manual_seed(seed))
        for seed in (1, 1, 2)
    ]
    assert torch.equal(texts[0], texts[1]) and not torch.equal(texts[0], texts[2])
    assert torch.equal(torch.get_rng_state(), state)
    cold = net.sample(
        prompt, 30, use_cache_kv=False, top_p=0.9, generator=torch.Generator().manual_seed(1)
    )
    assert torch.equal(cold, texts[0])


def test_stream():
    net = model().train()
    prompt = tokens(2, 5)
    streamed = list(net.stream(prompt, 12, temperature=0.0))
    assert [t.shape for t in streamed] == [(2,)] * 7
    assert torch.equal(torch.stack(streamed, dim=1), net.sample(prompt, 12, temperature=0.0))
    assert net.training and not streamed[0].requires_grad
    assert net.sample(prompt, 5).shape == (2, 0)


def test_sample_token():
    """What each threshold leaves to choose from."""
    logits = torch.log(torch.tensor([[0.5, 0.3, 0.15, 0.05]])).expand(4000, -1)
    draw = lambda **kw: sample_token(  # noqa: E731
        logits, **{**dict(temperature=1.0, filter_thres=0.0, top_p=None), **kw},
        generator=torch.Generator().manual_seed(0),
    ).bincount(minlength=4) / 4000  # fmt: skip
    torch.testing.assert_close(draw(), torch.tensor([0.5, 0.3, 0.15, 0.05]), atol=0.03, rtol=0)
    assert (draw(filter_thres=0.5) > 0).tolist() == [True, True, False, False]
    assert (draw(top_p=0.6) > 0).tolist() == [True, True, False, False]
    assert (draw(top_p=0.5) > 0).tolist() == [True, False, False, False]
    assert (draw(filter_thres=0.99) > 0).tolist() == [True, False, False, False]
    assert draw(temperature=0.0)[0] == 1
    cold = torch.tensor([0.5, 0.3, 0.15, 0.05]) ** 2
    torch.testing.assert_close(draw(temperature=0.5), cold / cold.sum(), atol=0.03, rtol=0)


def test_each_layer_has_a_gate_of_its_own():
    kwargs = {**DEFAULT_SPARSE_ATTN, "strategy_combine_mlp": torch.nn.Linear(16, 6)}
    first, second = (attn for attn, _ in model(sparse_attn_kwargs=kwargs).layers)
    assert first.to_strategy_combine[0] is not second.to_strategy_combine[0]


def test_local_layers_rank_nothing():
    given = dict(dim=16, dim_head=8, heads=2, num_tokens=16, depth=3, use_sparse_attn=True)
    sparse = dict(branches=("selected",), importance="index", num_local_blocks=1)
    model = Transformer(**given, local_layers=[-1, 0], sparse_attn_kwargs=sparse)
    assert [attn.config.ranks for attn, _ in model.layers] == [False, True, False]
    assert [attn.to_index is None for attn, _ in model.layers] == [True, False, True]
    ids = torch.randint(0, 16, (2, 60))
    logits, cache = model(ids[:, :41], return_cache=True)
    rest = [model(ids[:, i : i + 1], cache=cache) for i in range(41, 60)]
    assert torch.allclose(torch.cat((logits, *rest), dim=1), model(ids), atol=1e-5)
    model.activation_checkpointing = True
    loss, ranking = model(ids, return_loss=True, ranking_queries=8)
    (loss + ranking).backward()
    assert all(p.grad is not None for p in model.parameters())
    assert ranking > 0
    mask = torch.ones(2, 60, dtype=torch.bool)
    mask[1, :25] = False
    out, _ = model(ids, mask=mask, ranking_queries=8)
    assert torch.allclose(out[1, 25:], model(ids[1:, 25:])[0], atol=1e-5)
    # a network that only ranks is left out where nothing is ranked
    network = GroupedMLP(8, 4, 2)
    sparse = dict(branches=("selected",), importance="probs", use_diff_topk=True)
    sizes = dict(selection_block_size=4, compress_block_size=4, compress_mlp=network)
    model = Transformer(**given, local_layers=[0], sparse_attn_kwargs=sparse | sizes)
    assert [attn.k_compress is None for attn, _ in model.layers] == [True, False, False]
    with pytest.raises(ValueError, match="must be a list of indices of layers, got 1"):
        Transformer(**given, local_layers=1)
    with pytest.raises(ValueError, match="must be an integer .* below 3, got 3"):
        Transformer(**given, local_layers=[3])
    with pytest.raises(ValueError, match="local_layers must be empty with use_sparse_attn=False"):
        Transformer(**given | dict(use_sparse_attn=False), local_layers=[1])


@both
def test_loss_and_cache(use_sparse_attn):
    net = model(use_sparse_attn)
    ids = tokens(2, 30)
    with torch.no_grad():
        loss, cache = net(ids, return_loss=True, return_cache=True)
        torch.testing.assert_close(loss, net(ids, return_loss=True))
        torch.testing.assert_close(net(ids[:, -1:], cache=cache), net(ids)[:, -1:])


def test_flex_masks():
    kwargs = dict(use_flex_sliding_window=True, use_flex_fine_selection=True)
    net, plain = model(**kwargs), model()
    plain.load_state_dict(net.state_dict())
    ids = tokens(2, 37)
    with torch.no_grad():
        torch.testing.assert_close(net(ids), plain(ids))
        torch.testing.assert_close(net(ids, disable_flex=True), plain(ids))


def test_learns():
    """A few steps on a repeating text bring the loss well under that of guessing."""
    torch.manual_seed(0)
    net = Transformer(**SHAPE, use_sparse_attn=True)
    ids = (torch.arange(4)[:, None] + torch.arange(49) * 3) % 32
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    for _ in range(60):
        loss = net(ids, return_loss=True)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss < 0.5  # guessing among 32 costs 3.47 nats
    text = net.sample(ids[:, :20], 49, temperature=0.0)
    assert (text == ids[:, 20:]).float().mean() > 0.95


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: Transformer(0, 16, 1), "num_tokens must be an integer of at least 1, got 0"),
        (
            lambda: model(use_flex_fine_selection=True, use_triton_fine_selection=True),
            "use_flex_fine_selection and use_triton_fine_selection are two ways",
        ),
        (lambda: model()(tokens(5)), "ids must have shape [b, n], got [5]"),
        (lambda: model()(tokens(2, 1), return_loss=True), "ids must have at least 2 tokens"),
        (lambda: model()(tokens(2, 1), cache=[]), "cache must hold one KVCache for each of 2"),
        (lambda: model().sample(tokens(2, 0), 5), "prompt must have shape [b, n] with at least"),
        (lambda: model().sample(tokens(5), 5), "prompt must have shape [b, n]"),
        (lambda: model(causal=False).sample(tokens(1, 2), 5), "sampling needs causal=True"),
        (lambda: model().sample(tokens(1, 2), 5, filter_thres=1.0), "filter_thres must be in"),
        (lambda: model().sample(tokens(1, 2), 5, top_p=0.0), "top_p must be in (0, 1], got 0.0"),
        (lambda: model()(tokens(2, 3), lengths=[1, 2]), "lengths goes with a cache"),
    ],
)
def test_bad_calls(call, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        call()
