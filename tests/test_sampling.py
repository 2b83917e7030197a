"""Sampling and streaming: with a cache or without, prompts of different lengths, tokens that end a
text, what is drawn; every module is left in the mode that it was in."""

import pytest
import torch

from native_sparse_attention import Transformer
from native_sparse_attention.compress import CompressTransformer
from native_sparse_attention.generate import token_sampler
from tests.helpers.budget import DEVICE
from tests.helpers.layers import TOKENS
from tests.helpers.sizes import sizes

both = pytest.mark.parametrize("use_sparse_attn", [True, False])
with_cache = pytest.mark.parametrize("use_cache_kv", [True, False])
SIZES = sizes(8, 4, 8, n=2, w=9, num_compressed_mem_kv=1)


def model(use_sparse_attn=True, causal=True, **changed):
    torch.manual_seed(0)
    sparse = dict(use_sparse_attn=True, sparse_attn_kwargs=SIZES | changed)
    net = Transformer(
        40, 32, 2, dim_head=16, heads=4, kv_heads=2, causal=causal,
        **sparse if use_sparse_attn else {},
    )  # fmt: skip
    return net.to(DEVICE).eval()


def prompts(*shape):
    return torch.randint(0, 40, shape, device=DEVICE)


@pytest.mark.parametrize("kind", ["three branches", "one softmax", "dense"])
def test_greedy(kind):
    """Each prompt goes on as it would alone, with the cache or without, streamed or not."""
    one = dict(branches=("selected",), rank_rotated=True) if kind == "one softmax" else {}
    net, prompt, lengths = model(kind != "dense", **one), prompts(3, 11), [11, 1, 7]
    call = dict(temperature=0.0, prompt_lengths=lengths)
    cached = net.sample(prompt, 30, **call)
    assert cached.shape == (3, 19)
    for row, n in enumerate(lengths):
        alone = net.sample(prompt[row : row + 1, :n], n + 19, temperature=0.0)
        assert torch.equal(cached[row : row + 1], alone)
    assert torch.equal(net.sample(prompt, 30, use_cache_kv=False, **call), cached)
    streamed = list(net.stream(prompt, 30, **call))
    assert torch.equal(torch.stack(streamed, dim=1), cached)
    assert not streamed[0].requires_grad and net.sample(prompt, 11).shape == (3, 0)
    # logits over the lowest temperature pass every float; the probabilities stay what they are
    lowest = dict(call, temperature=torch.finfo(torch.float32).tiny)
    assert torch.equal(net.sample(prompt, 30, **lowest), cached)
    assert torch.equal(net.sample(prompt, 30, prompt_lengths=lengths, top_k=1), cached)


@with_cache
def test_stop_tokens(use_cache_kv):
    """A text repeats the token that ended it; where all have ended, none follows."""
    net, prompt = model(), prompts(2, 5)
    call = dict(temperature=0.0, use_cache_kv=use_cache_kv)
    free = net.sample(prompt, 20, **call)
    stop = free[0, 3].item()
    for row, text in zip(net.sample(prompt, 20, stop_tokens=stop, **call), free):
        end = (text == stop).nonzero()[0].item() if (text == stop).any() else len(text)
        assert torch.equal(row[: end + 1], text[: len(row)][: end + 1])
        assert (row[end:] == stop).all()
    everything = net.sample(prompt, 20, stop_tokens=range(40), **call)
    assert torch.equal(everything, free[:, :1])


@both
def test_draws_repeat_with_their_generator(use_sparse_attn):
    net, prompt = model(use_sparse_attn), prompts(2, 5)

    def drawn(seed=1, **how):
        generator = torch.Generator(DEVICE).manual_seed(seed)
        return net.sample(prompt, 16, generator=generator, **dict(top_p=0.9) | how)

    state, text = torch.get_rng_state(), drawn()
    assert torch.equal(drawn(), text) and not torch.equal(drawn(2), text)
    assert torch.equal(drawn(use_cache_kv=False), text)
    assert torch.equal(torch.get_rng_state(), state)
    every = dict(filter_thres=0.0, top_p=None)
    assert torch.equal(drawn(**every, top_k=1000), drawn(**every))
    likely = net(prompt)[:, -1].topk(3).indices
    assert (drawn(**every, top_k=3)[:, :1] == likely).any(-1).all()


def test_token_sampler():
    """What each threshold leaves to choose from."""
    logits = torch.log(torch.tensor([[0.5, 0.3, 0.15, 0.05]])).expand(4000, -1)

    def draw(temperature=1.0, filter_thres=0.0, top_p=None, logits=logits):
        generator = torch.Generator().manual_seed(0)
        drawn = token_sampler(temperature, filter_thres, top_p, generator)(logits)
        return drawn.bincount(minlength=4) / len(logits)

    torch.testing.assert_close(draw(), torch.tensor([0.5, 0.3, 0.15, 0.05]), atol=0.03, rtol=0)
    assert (draw(filter_thres=0.5) > 0).tolist() == [True, True, False, False]
    assert (draw(top_p=0.6) > 0).tolist() == [True, True, False, False]
    assert (draw(top_p=0.5) > 0).tolist() == [True, False, False, False]
    assert (draw(filter_thres=0.99) > 0).tolist() == [True, False, False, False]
    assert draw(temperature=0.0)[0] == 1
    for temperature, top_p in ((1e-37, None), (1e-37, 2e-38), (1e-320, None)):
        assert draw(temperature, 0.0, top_p, torch.tensor([[5.0, -3.0, 1.0]]))[0] == 1
    cold = torch.tensor([0.5, 0.3, 0.15, 0.05]) ** 2
    torch.testing.assert_close(draw(temperature=0.5), cold / cold.sum(), atol=0.03, rtol=0)
    # (1 - 0.7) * 10 is a little more than 3
    for count, threshold, kept in ((10, 0.7, 3), (10, 0.9, 1), (100, 0.71, 29), (10, 0.65, 4)):
        flat = torch.zeros(2000, count)
        assert (draw(filter_thres=threshold, logits=flat) > 0).sum() == kept


@both
@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int32])
@torch.no_grad()
def test_ids_of_any_integral_dtype(use_sparse_attn, dtype):
    net, ids = model(use_sparse_attn), prompts(2, 24)
    segments = torch.arange(24, device=DEVICE).expand(2, -1) // 9
    lengths, bounds = torch.tensor([9, 2]), torch.tensor([0, 5, 24], device=DEVICE)
    greedy = dict(temperature=0.0, prompt_lengths=lengths.to(dtype))

    def call(ids):
        return [
            net(ids),
            net(ids, True, segment_ids=segments.to(torch.int32)),
            net(ids[:1], True, cu_seqlens=bounds.int()),
            net(ids[:, :9], cache=net.new_cache(max_length=32), lengths=lengths.to(dtype)),
            net.sample(ids[:, :9], 12, stop_tokens=[3, 39], **greedy),
            net.sample(ids[:, :9], 12, use_cache_kv=False, **greedy),
        ]

    torch.testing.assert_close(call(ids.to(dtype)), call(ids), atol=0.0, rtol=0.0)


def model_with_dropout():
    network = CompressTransformer(1, 32, 2, dropout=0.5)
    return model(compress_mlp=network).train()


def modes(net):
    return {name: module.training for name, module in net.named_modules()}


def freeze_part(net):
    net.layers[0].eval()
    net.layers[0][1].train()


def test_modes_are_as_before():
    """After a text, between its tokens, and of a stream that nobody reads to its end."""
    net, ids = model_with_dropout(), prompts(1, 10)
    freeze_part(net)
    before = modes(net)
    for call in (dict(use_cache_kv=True), dict(use_cache_kv=False)):
        first, second = net.stream(ids, 22, **call), net.stream(ids, 30, **call)
        for _ in range(3):
            next(first), next(second)
            assert modes(net) == before
        first.close()
        del second
        net.sample(ids, 13, **call)
        assert modes(net) == before


@with_cache
def test_modes_after_an_error(use_cache_kv):
    """At the prompt, and at a later token."""
    net, ids = model_with_dropout(), prompts(1, 10)
    freeze_part(net)
    before, calls = modes(net), []

    def fail(module, args):
        assert not module.training
        calls.append(module)
        if len(calls) in (1, 4):
            raise KeyboardInterrupt

    with net.norm.register_forward_pre_hook(fail):
        for _ in range(2):
            with pytest.raises(KeyboardInterrupt):
                net.sample(ids, 22, use_cache_kv=use_cache_kv)
            assert modes(net) == before
    assert len(calls) == 4


@pytest.mark.gpu
@pytest.mark.parametrize(
    "changed",
    [
        {}, dict(selection_stride=4), dict(importance="probs"),
        # dense steps before this length are of no graph: they read more keys each time
        *(dict(TOKENS, importance=rule, dense_length=48, num_initial_blocks=1, **bits)
          for rule, bits in (("max", {}), ("index", {}), ("head_max", dict(ranking_bits=4)))),
    ],
    ids=str,
)  # fmt: skip
def test_graphs_sample_what_eager_pytorch_does(changed):
    """Greedy, in fp32: the same tokens."""
    net, prompt = model(**changed), prompts(3, 21)
    call = dict(temperature=0.0, prompt_lengths=[21, 6, 13])
    graphed = net.sample(prompt, 90, **call)
    for block in net.layers:
        block[0].backend = "eager"
    assert torch.equal(net.sample(prompt, 90, use_cache_kv=False, **call), graphed)
    assert torch.equal(net.sample(prompt, 90, **call), graphed)


@pytest.mark.gpu
def test_graphs_outlast_an_autocast():
    """Tokens asked for under one autocast after the other, and much memory used between them."""
    net, prompt = model(), prompts(2, 21)
    with torch.autocast("cuda", torch.bfloat16):
        expected = net.sample(prompt, 80, temperature=0.0)
    tokens, texts = [], net.stream(prompt, 80, temperature=0.0)
    for _ in range(4):
        with torch.autocast("cuda", torch.bfloat16):
            tokens += [next(texts) for _ in range(14)]
        for _ in range(3):
            torch.full((1 << 22,), float("nan"), device=DEVICE)
            [torch.full((32 * i,), float("nan"), device=DEVICE) for i in range(1, 400)]
    assert torch.equal(torch.stack(tokens, 1), expected[:, :56])
