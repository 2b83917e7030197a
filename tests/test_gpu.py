"""On a CUDA device: what `auto` chooses there is the layer that the CPU computes in fp64.

Triton kernels for two branches, flex_attention where it can for the third, else eager PyTorch.
"""

import copy

import pytest
import torch

from native_sparse_attention import KVCache, SparseAttention, Transformer
from tests.helpers.layers import DIM, SETTINGS, layer

pytestmark = pytest.mark.gpu

# heads of 16, which flex_attention can take
WIDE = dict(dim_head=16)
CHOSEN = ["default", "paper", "shared rankings", "own rankings", "diff top-k", "independent"]


def normal(*shape, dtype=torch.float32):
    return torch.randn(*shape, dtype=dtype).cuda()


def run(module, x, weight):
    x = x.detach().requires_grad_()
    module.zero_grad()
    out = module(x)
    (out * weight).sum().backward()
    grads = {name: p.grad for name, p in module.named_parameters() if p.grad is not None}
    return {"output": out.detach(), "input": x.grad, **grads}


@pytest.mark.parametrize("length", [1, 40, 131, 300])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("setting", CHOSEN)
def test_fp32(setting, causal, length):
    exact = layer(**{**WIDE, **SETTINGS[setting]}, causal=causal)
    module = copy.deepcopy(exact).float().cuda()
    exact.load_state_dict(module.state_dict())
    x, weight = torch.randn(2, length, DIM), torch.randn(2, length, DIM)
    actual = run(module, x.cuda(), weight.cuda())
    expected = run(exact, x.double(), weight.double())
    assert actual.keys() == expected.keys()
    for name in expected:
        error = (actual[name].cpu().double() - expected[name]).abs().max()
        assert error <= 1e-4 * (1 + expected[name].abs().max()), name


@pytest.mark.parametrize("setting", ["default", "shared rankings"])
def test_cached_decoding(setting):
    module = layer(**{**WIDE, **SETTINGS[setting]}, dtype=torch.float32).cuda()
    x = normal(3, 50, DIM)
    with torch.no_grad():
        expected = module(x)
        cache = KVCache(max_length=60)
        outs = [module(t, cache=cache, return_cache=True)[0] for t in x.split([30, 1, 1, 17, 1], 1)]
        torch.testing.assert_close(torch.cat(outs, 1), expected, atol=1e-4, rtol=1e-4)
        _, cache = module(x[:, :30], return_cache=True, lengths=[30, 11, 4])
        step = torch.stack([x[row, n : n + 3] for row, n in enumerate((30, 11, 4))])
        out, _ = module(step, cache=cache, return_cache=True)
        for row, n in enumerate((30, 11, 4)):
            torch.testing.assert_close(out[row], expected[row, n : n + 3], atol=1e-4, rtol=1e-4)
        on_cpu = cache.clone().to("cpu")
        assert on_cpu.device == torch.device("cpu") and cache.device.type == "cuda"


@pytest.mark.parametrize("use_sparse_attn", [True, False])
def test_training_under_autocast_and_compile(use_sparse_attn):
    """bf16 autocast, compiled, several lengths: losses near the eager ones; and greedy sampling."""
    torch.manual_seed(0)
    net = Transformer(
        64,
        64,
        2,
        dim_head=16,
        heads=4,
        kv_heads=2,
        use_sparse_attn=use_sparse_attn,
    ).cuda()
    compiled = torch.compile(net)
    for length in (65, 129, 200):
        ids = torch.randint(0, 64, (2, length)).cuda()
        losses = []
        for run_ in (net, compiled):
            net.zero_grad()
            with torch.autocast("cuda", dtype=torch.bfloat16):
                loss = run_(ids, return_loss=True)
            loss.backward()
            losses.append(loss.item())
            assert all(p.grad.isfinite().all() for p in net.parameters() if p.grad is not None)
        assert abs(losses[0] - losses[1]) < 0.02
    prompt = torch.randint(0, 64, (2, 20)).cuda()
    cached = net.sample(prompt, 40, temperature=0.0)
    assert (cached == net.sample(prompt, 40, temperature=0.0, use_cache_kv=False)).all()


@pytest.mark.parametrize(
    "ranking",
    [
        {},
        {"importance": "probs"},
        {"use_diff_topk": True},
        {"importance": "probs", "use_diff_topk": True},
    ],
    ids=str,
)
@pytest.mark.parametrize("stride", [1, 4])
@pytest.mark.parametrize("dim_head", [64, 128])
@pytest.mark.parametrize("heads, kv_heads", [(8, 2), (16, 1)])
def test_no_sync_between_projection_and_output(
    waits_for_nothing, heads, kv_heads, dim_head, stride, ranking
):
    """Under bf16 autocast, block by block and query by query; and in fp32 with narrow heads."""
    wide = SparseAttention(
        DIM, dim_head, heads, 63, 32, 64, 4, kv_heads=kv_heads, causal=True,
        compress_block_sliding_stride=16, num_initial_blocks=1, selection_stride=stride,
        **ranking,
    ).cuda()  # fmt: skip
    narrow = layer(**WIDE, **ranking, selection_stride=stride, dtype=torch.float32).cuda()
    x = normal(2, 300, DIM).requires_grad_()

    def steps():
        with torch.autocast("cuda", dtype=torch.bfloat16):
            out = wide(x)
        (out.float().square().sum() + narrow(x[:, :64]).sum()).backward()

    steps()  # builds masks and compiles
    with waits_for_nothing():
        steps()
