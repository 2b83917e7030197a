"""On a CUDA device: what `auto` chooses there is the layer that the CPU computes in fp64. On the
second of two GPUs it is what it is on the first, whichever is the current one."""

import pytest
import torch

from native_sparse_attention import KVCache, PagedKVCache, SparseAttention, Transformer
from tests.helpers.decoder import CACHES, Decoder
from tests.helpers.layers import DIM, SETTINGS, layer

pytestmark = pytest.mark.gpu
two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")

# heads of 16, which flex_attention can take
WIDE = dict(dim_head=16)
KERNELS = dict(
    sliding_window_size=63, compress_block_size=32, compress_block_sliding_stride=16,
    selection_block_size=64, num_selected_blocks=4,
)  # fmt: skip
RANKINGS = [{}, dict(use_diff_topk=True), dict(selection_stride=4), dict(importance="probs")]


@pytest.mark.parametrize("make", CACHES.values(), ids=list(CACHES))
@pytest.mark.parametrize("setting", ["default", "shared rankings"])
def test_decoding(setting, make):
    module = layer(torch.float32, **WIDE | SETTINGS[setting]).cuda()
    decoder = Decoder(module, torch.randn(3, 50, DIM).cuda(), make(3), tol=1e-4)
    decoder.step(30, 11, 4)
    decoder.step(1, times=2)
    decoder.step(9, 17, 2)
    decoder.step(1)
    on_cpu = decoder.cache.clone().to("cpu")
    assert on_cpu.device == torch.device("cpu") and decoder.cache.device.type == "cuda"


@pytest.mark.parametrize(
    "ranking", [*RANKINGS, dict(importance="probs", use_diff_topk=True)], ids=str
)
@pytest.mark.parametrize("dim_head", [64, 128])
@pytest.mark.parametrize("heads, kv_heads", [(8, 2), (16, 1)])
def test_no_sync_between_projection_and_output(
    waits_for_nothing, heads, kv_heads, dim_head, ranking
):
    """Under bf16 autocast, block by block and query by query; and in fp32 with narrow heads."""
    wide = SparseAttention(
        DIM, dim_head, heads, kv_heads=kv_heads, causal=True, num_initial_blocks=1,
        **KERNELS, **ranking,
    ).cuda()  # fmt: skip
    narrow = layer(torch.float32, **WIDE, **ranking).cuda()
    x = torch.randn(2, 300, DIM).cuda().requires_grad_()

    def step():
        with torch.autocast("cuda", dtype=torch.bfloat16):
            out = wide(x)
        (out.float().square().sum() + narrow(x[:, :64]).sum()).backward()

    step()  # builds masks and compiles
    with waits_for_nothing():
        step()


# two GPUs in one process


def assert_same_on_each(call):
    """What `call` returns on each of two GPUs, there, and the first stays the current one."""
    torch.cuda.set_device(0)
    results = []
    for device in (torch.device("cuda", index) for index in (0, 1)):
        outs = call(device)
        assert all(out.device == device for out in outs) and torch.cuda.current_device() == 0
        results.append([out.cpu() for out in outs])
    torch.testing.assert_close(*results, rtol=0, atol=0)


def attention(**settings):
    torch.manual_seed(0)
    return SparseAttention(128, 64, 8, kv_heads=2, causal=True, **KERNELS | settings)


@two_gpus
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("settings", RANKINGS, ids=str)
def test_on_each_gpu(settings, dtype):
    """Training and decoding, also of a module that ran on the other one before: tables that it
    keeps go with it."""
    module, x = attention(**settings), torch.randn(2, 300, 128)

    def call(device):
        module.to(device).zero_grad()
        leaf, outs = x.to(device).requires_grad_(), []
        with torch.autocast("cuda", dtype=dtype, enabled=dtype != torch.float32):
            out = module(leaf)
            for cache in (KVCache(320, 2), PagedKVCache(64, 10, batch=2, max_length=320)):
                with torch.no_grad():
                    for chunk in leaf.split([130, 1, 3, 166], 1):
                        outs.append(module(chunk, cache=cache))
        out.float().square().mean().backward()
        grads = [p.grad for p in module.parameters() if p.grad is not None]
        return [out, leaf.grad, *outs, *grads]

    assert_same_on_each(call)


@two_gpus
@torch.no_grad()
def test_a_cache_stays_where_it_is():
    module, cache = attention().eval().to("cuda:1"), KVCache(192, 1)
    module(torch.randn(1, 70, 128, device="cuda:1"), cache=cache)
    module.to("cuda:0")
    with pytest.raises(ValueError, match="cuda:1"):
        module(torch.randn(1, 1, 128, device="cuda:0"), cache=cache)
    assert list(cache.lengths) == [70]


@two_gpus
@pytest.mark.parametrize("use_sparse_attn", [True, False])
def test_sampling_on_each_gpu(use_sparse_attn):
    """By steps that are CUDA graphs."""
    torch.manual_seed(0)
    shape = dict(dim_head=32, heads=4, kv_heads=2, use_sparse_attn=use_sparse_attn)
    sparse = dict(sparse_attn_kwargs=KERNELS) if use_sparse_attn else {}
    model = Transformer(64, 64, 2, **shape, **sparse).eval()
    prompt = torch.randint(0, 64, (2, 100))
    assert_same_on_each(
        lambda device: [model.to(device).sample(prompt.to(device), 140, temperature=0.0)]
    )
