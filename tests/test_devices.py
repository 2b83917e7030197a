"""Two GPUs in one process: what runs is where the tensors are, whichever GPU is the current one."""

import pytest
import torch

from native_sparse_attention import KVCache, PagedKVCache, SparseAttention, Transformer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]

SETTINGS = dict(
    sliding_window_size=63, compress_block_size=32, compress_block_sliding_stride=16,
    selection_block_size=64, num_selected_blocks=4, num_compressed_mem_kv=1,
)  # fmt: skip
OTHERS = [{}, dict(use_diff_topk=True), dict(selection_stride=4), dict(importance="probs")]


@pytest.fixture(autouse=True)
def first_is_current():
    torch.cuda.set_device(0)
    yield
    assert torch.cuda.current_device() == 0


def attention(**settings):
    torch.manual_seed(0)
    return SparseAttention(
        dim=128, dim_head=64, heads=8, kv_heads=2, causal=True, **SETTINGS | settings
    )


def on_each(run):
    """What `run` returns on each of two GPUs, there and then on the CPU."""
    found = []
    for index in (0, 1):
        device = torch.device("cuda", index)
        outs = run(device)
        assert all(out.device == device for out in outs)
        found.append([out.cpu() for out in outs])
    return zip(*found, strict=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("settings", OTHERS, ids=str)
def test_forward_and_backward(settings, dtype):
    """Also of a module that ran on the other one before: tables that it keeps go with it."""
    module = attention(**settings)
    x = torch.randn(2, 300, 128)

    def run(device):
        module.to(device)
        module.zero_grad()
        given = x.to(device).requires_grad_()
        with torch.autocast("cuda", dtype=dtype, enabled=dtype != torch.float32):
            out = module(given)
        out.float().square().mean().backward()
        return [out, given.grad, *(p.grad for p in module.parameters() if p.grad is not None)]

    for first, second in on_each(run):
        assert torch.equal(first, second)


def test_compiled():
    """To float32's precision: the compiler times its own kernels, and may choose others there."""
    x = torch.randn(1, 200, 128)

    def run(device):
        return [torch.compile(attention().to(device), fullgraph=True)(x.to(device))]

    for first, second in on_each(run):
        torch.testing.assert_close(first, second)


@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("settings", OTHERS, ids=str)
def test_decoding(settings, paged):
    module = attention(**settings).eval()
    x = torch.randn(2, 150, 128)

    @torch.no_grad()
    def run(device):
        module.to(device)
        cache = PagedKVCache(64, 8, batch=2, max_length=192) if paged else KVCache(192, 2)
        chunks = x.to(device).split([130, 1, 3, 16], 1)
        return [module(chunk, cache=cache, return_cache=True)[0] for chunk in chunks]

    for first, second in on_each(run):
        assert torch.equal(first, second)


@torch.no_grad()
def test_a_cache_stays_where_it_is():
    module, cache = attention().eval().to("cuda:1"), KVCache(192, 1)
    module(torch.randn(1, 70, 128, device="cuda:1"), cache=cache, return_cache=True)
    module.to("cuda:0")
    with pytest.raises(ValueError, match="cuda:1"):
        module(torch.randn(1, 1, 128, device="cuda:0"), cache=cache, return_cache=True)
    assert list(cache.lengths) == [70]


@pytest.mark.parametrize("use_sparse_attn", [True, False])
def test_sampling(use_sparse_attn):
    """By steps that are CUDA graphs."""
    torch.manual_seed(0)
    model = Transformer(
        64, 64, 2, dim_head=32, heads=4, kv_heads=2, use_sparse_attn=use_sparse_attn,
        sparse_attn_kwargs=SETTINGS if use_sparse_attn else None,
    ).eval()  # fmt: skip
    prompt = torch.randint(0, 64, (2, 100))

    def run(device):
        return [model.to(device).sample(prompt.to(device), 140, temperature=0.0)]

    for first, second in on_each(run):
        assert torch.equal(first, second)
