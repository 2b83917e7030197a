"""Sampling with a cache: prompts of different lengths, tokens that end a text, steps as CUDA
graphs."""

import pytest
import torch

from native_sparse_attention import Transformer
from tests.helpers.budget import DEVICE


def model(**kwargs):
    torch.manual_seed(0)
    sparse = dict(
        sliding_window_size=9, compress_block_size=8, compress_block_sliding_stride=4,
        selection_block_size=8, num_selected_blocks=2, num_compressed_mem_kv=1, **kwargs,
    )  # fmt: skip
    net = Transformer(
        40, 32, 2, dim_head=16, heads=4, kv_heads=2, use_sparse_attn=True, sparse_attn_kwargs=sparse
    )
    return net.to(DEVICE).eval()


@pytest.mark.parametrize("use_sparse_attn", [True, False])
def test_prompts_of_different_lengths(use_sparse_attn):
    """Each goes on as it would alone, with the cache or without."""
    net = model() if use_sparse_attn else Transformer(40, 32, 1, dim_head=16, heads=2).to(DEVICE)
    prompt, lengths = torch.randint(0, 40, (3, 11), device=DEVICE), [11, 4, 7]
    call = dict(temperature=0.0, prompt_lengths=lengths)
    cached = net.sample(prompt, 40, **call)
    assert cached.shape == (3, 29)
    for row, n in enumerate(lengths):
        alone = net.sample(prompt[row : row + 1, :n], n + 29, temperature=0.0)
        assert torch.equal(cached[row : row + 1], alone)
    assert torch.equal(net.sample(prompt, 40, use_cache_kv=False, **call), cached)


@pytest.mark.parametrize("use_cache_kv", [True, False])
def test_stop_tokens(use_cache_kv):
    """A text repeats the token that ended it; where all have ended, none follows."""
    net = model()
    prompt = torch.randint(0, 40, (2, 5), device=DEVICE)
    call = dict(temperature=0.0, use_cache_kv=use_cache_kv)
    free = net.sample(prompt, 30, **call)
    stop = free[0, 3].item()
    out = net.sample(prompt, 30, stop_tokens=stop, **call)
    for row, text in zip(out, free):
        end = (text == stop).nonzero()[0].item() if (text == stop).any() else len(text)
        assert torch.equal(row[: end + 1], text[: len(row)][: end + 1])
        assert (row[end:] == stop).all()
    everything = net.sample(prompt, 30, stop_tokens=range(40), **call)
    assert torch.equal(everything, free[:, :1])


def test_top_k():
    """Of one token there is no choice; of more than there are, the vocabulary is left."""
    net = model()
    prompt = torch.randint(0, 40, (2, 5), device=DEVICE)
    greedy = net.sample(prompt, 30, temperature=0.0)
    assert torch.equal(net.sample(prompt, 30, filter_thres=0.0, top_k=1), greedy)

    def drawn(**how):
        generator = torch.Generator(DEVICE).manual_seed(0)
        return net.sample(prompt, 30, filter_thres=0.0, generator=generator, **how)

    assert torch.equal(drawn(top_k=1000), drawn())
    few = torch.stack([drawn(top_k=3)[:, 0] for _ in range(3)])
    likely = net(prompt)[:, -1].topk(3).indices
    assert (few[..., None] == likely).any(-1).all()


def test_low_temperature():
    """Logits over it pass every float; the probabilities stay what they are."""
    net = model()
    prompt = torch.randint(0, 40, (2, 5), device=DEVICE)
    greedy = net.sample(prompt, 30, temperature=0.0)
    lowest = torch.finfo(torch.float32).tiny
    assert torch.equal(net.sample(prompt, 30, temperature=lowest), greedy)


@pytest.mark.parametrize(
    "wrong, message",
    [
        (dict(prompt_lengths=[5]), "prompt_lengths must be 2 integers between 1 and 5"),
        (dict(prompt_lengths=[0, 5]), "prompt_lengths must be"),
        (dict(prompt_lengths=[1.0, 5]), "prompt_lengths must be integers"),
        (dict(stop_tokens=[1.5]), "stop_tokens must be token ids, got 1.5"),
        (dict(top_k=0), "top_k must be"),
        (dict(top_k=True), "top_k must be"),
        (dict(top_k=2.0), "top_k must be"),
        (dict(stop_tokens=-1), "stop_tokens must be token ids, got -1"),
    ],
)
def test_bad_prompts(wrong, message):
    with pytest.raises(ValueError, match=message):
        model().sample(torch.zeros(2, 5, dtype=torch.long, device=DEVICE), 9, **wrong)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "changed", [{}, dict(selection_stride=4), dict(importance="probs")], ids=str
)
def test_graphs_sample_what_eager_pytorch_does(changed, steps):
    """Greedy, in fp32: the same tokens; and the graphs are replayed, not passed by."""
    net = model(**changed)
    prompt = torch.randint(0, 40, (3, 21), device=DEVICE)
    call = dict(temperature=0.0, prompt_lengths=[21, 6, 13])
    graphed = net.sample(prompt, 90, **call)
    # a step as it is and a captured one, of each kind and layer
    assert len(steps) <= 8
    for block in net.layers:
        block[0].backend = "eager"
    assert torch.equal(net.sample(prompt, 90, use_cache_kv=False, **call), graphed)
    assert torch.equal(net.sample(prompt, 90, **call), graphed)


@pytest.mark.gpu
@pytest.mark.parametrize("importance", ["max", "index"])
def test_graphs_begin_past_the_dense_length(importance):
    """Dense steps before it are of no graph: they read more keys each time."""
    torch.manual_seed(0)
    sparse = dict(
        sliding_window_size=9, compress_block_size=1, compress_block_sliding_stride=1,
        selection_block_size=8, num_selected_blocks=2, num_initial_blocks=1, branches=("selected",),
        importance=importance, rank_rotated=True, dense_length=48,
    )  # fmt: skip
    shape = dict(dim_head=16, heads=4, kv_heads=2, use_sparse_attn=True, sparse_attn_kwargs=sparse)
    net = Transformer(40, 32, 2, **shape).to(DEVICE).eval()
    prompt = torch.randint(0, 40, (3, 21), device=DEVICE)
    graphed = net.sample(prompt, 90, temperature=0.0)
    for block in net.layers:
        block[0].backend = "eager"
    assert torch.equal(net.sample(prompt, 90, temperature=0.0), graphed)


@pytest.mark.gpu
def test_graphs_outlast_an_autocast():
    """Tokens asked for under one autocast after the other, and much memory used between them."""
    net = model()
    prompt = torch.randint(0, 40, (2, 21), device=DEVICE)
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
