"""On a CUDA device, over what `auto` chooses there: decoding, no waits for the host, training, and
very long sequences. On the second of two GPUs a layer is what it is on the first, whichever is the
current one."""

import copy
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import native_sparse_attention as nsa
from native_sparse_attention import KVCache, PagedKVCache, SparseAttention, Transformer
from tests.helpers.budget import assert_right
from tests.helpers.calls import Call, under_selection
from tests.helpers.decoder import CACHES, Decoder
from tests.helpers.layers import DIM, SETTINGS, layer
from tests.helpers.memory import no_sync
from tests.helpers.processes import printed, python
from tests.helpers.sizes import sizes

pytestmark = pytest.mark.gpu
two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")

# heads of 16, which flex_attention can take
WIDE = dict(dim_head=16)
KERNELS = sizes(32, 16, 64, n=4, w=63)
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
def test_no_sync_between_projection_and_output(heads, kv_heads, dim_head, ranking):
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
    with no_sync():
        step()


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
    """With 32 selected blocks nothing hangs on near-ties."""
    torch.manual_seed(0)
    module = SparseAttention(128, 64, 8, kv_heads=2, causal=True, **KERNELS | settings)
    with torch.no_grad():
        for p in (module.compress_mem_kv, module.k_intrablock_positions):
            p.copy_(torch.randn_like(p))
    return module


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


def draw(length):
    return torch.randn(2, length, 128, device="cuda")


@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream:UserWarning")
@pytest.mark.parametrize("settings", [{}, {"selection_stride": 4, "recompute": True}], ids=str)
def test_step_captured_in_a_graph(settings):
    """Forward, backward and optimizer: replayed on other data it is the step that it was."""
    x, target = draw(300), draw(300)

    def trainer(module):
        optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3, capturable=True)

        def step():
            optimizer.zero_grad(set_to_none=True)
            with torch.autocast("cuda", dtype=torch.bfloat16, cache_enabled=False):
                out = module(x)
            loss = F.mse_loss(out.float(), target)
            loss.backward()
            optimizer.step()
            return loss.detach()

        return optimizer, step

    module = attention(num_selected_blocks=2, **settings).cuda()
    other = copy.deepcopy(module)
    optimizer, step = trainer(module)
    _, plain_step = trainer(other)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    for _ in range(3):
        plain_step()
    optimizer.zero_grad(set_to_none=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = step()
    for _ in range(3):
        x.copy_(draw(300))
        target.copy_(draw(300))
        graph.replay()
        torch.testing.assert_close(loss, plain_step(), atol=1e-5, rtol=1e-5)
    for p, expected in zip(module.parameters(), other.parameters()):
        torch.testing.assert_close(p, expected, atol=1e-5, rtol=1e-5)


def test_float16_with_a_scaler():
    """Nothing overflows at the scale that it begins with, and gradients are those of float32."""
    module, x = attention(num_selected_blocks=32).cuda(), draw(300)
    exact, scaler = copy.deepcopy(module), torch.amp.GradScaler("cuda")
    F.mse_loss(exact(x), x.roll(1, 1)).backward()
    with torch.autocast("cuda", dtype=torch.float16):
        out = module(x)
    scaler.scale(F.mse_loss(out.float(), x.roll(1, 1))).backward()
    for (name, p), q in zip(module.named_parameters(), exact.parameters()):
        grad = p.grad / scaler.get_scale()
        assert grad.isfinite().all(), name
        assert (grad - q.grad).norm() <= 0.05 * q.grad.norm() + 1e-6, name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_compiled_for_all_lengths(dtype):
    """One graph, compiled at most twice, forward and backward, that errs no more than twice as much
    as without compiling, against fp64."""
    from torch._inductor.compile_fx import compile_fx

    module, graphs = attention(num_selected_blocks=32).cuda().to(dtype), []
    for network in (module.k_compress, module.v_compress):
        network[2] = torch.nn.SiLU()  # a ReLU's gradient hangs on the sign of the least product
    exact = copy.deepcopy(module).double()

    def counted(graph, inputs):
        graphs.append(graph)
        return compile_fx(graph, inputs)

    torch.compiler.reset()
    compiled = torch.compile(module, fullgraph=True, dynamic=True, backend=counted)
    for length in (300, 517, 1100, 2048):
        x, weight = (draw(length).to(dtype) for _ in range(2))
        results = []
        for call, kind in ((compiled, dtype), (module, dtype), (exact, torch.float64)):
            inp = x.to(kind).requires_grad_()
            out = call(inp)
            leaves = [inp, *(module if call is compiled else call).parameters()]
            results.append([out, *torch.autograd.grad((out * weight.to(kind)).sum(), leaves)])
        for actual, expected, right in zip(*results, strict=True):
            if dtype == torch.float32:
                assert (actual - expected).norm() <= 1e-3 * expected.norm()
            error, plain = ((t.double() - right).norm() for t in (actual, expected))
            assert error <= 2 * plain + torch.finfo(dtype).eps * right.norm()
    assert len(graphs) <= 2


PAPER = sizes(32, 16, 64, n=13, w=511, num_initial_blocks=1, num_local_blocks=2)


@pytest.mark.parametrize(
    "T, heads, kv_heads, width, rows", [(1 << 20, 2, 1, 64, 64), (300_000, 64, 4, 128, 4)], ids=str
)
def test_many_tokens(T, heads, kv_heads, width, rows):
    """The whole layer: offsets past 2^31, a million tokens. The last rows, and what their gradient
    gives to everything, are within the budget."""
    bf16 = {"device": "cuda", "dtype": torch.bfloat16}
    q = torch.randn(1, T, heads, width, **bf16)
    gates = torch.rand(1, T, heads, 3, **bf16)
    shapes = dict.fromkeys("kv", (1, T, kv_heads, width))
    shapes |= dict.fromkeys(("ck", "cv"), (1, T // 16, kv_heads, width))
    keys = {name: torch.randn(shape, **bf16) for name, shape in shapes.items()}
    before, last = slice(0, T - rows), slice(T - rows, T)

    def attend(q, branch_gates, **keys):
        return nsa.native_sparse_attention(
            q, **keys, branch_gates=branch_gates, recompute=True, return_block_indices=True,
            backend="triton", **PAPER,
        )  # fmt: skip

    with torch.no_grad():
        lists = attend(q, gates, **keys)[1][:, last].clone()
    exact = nsa.select_blocks(
        q[:, last].double(), keys["ck"].double(), seq_len=T, backend="eager",
        **{n: value for n, value in PAPER.items() if n != "sliding_window_size"},
    )  # fmt: skip
    same = lists.sort(dim=-1).values == exact.sort(dim=-1).values
    assert same.double().mean() > 0.98  # but for near-ties

    specification = under_selection(Call(nsa.native_sparse_attention, {}, PAPER), lists)

    def op(*, backend, branch_gates, **leaves):
        if backend == "eager":
            return specification(**leaves, branch_gates=branch_gates, backend=backend)
        leaves["q"] = torch.cat((q[:, before], leaves["q"]), 1)
        return attend(**leaves, branch_gates=torch.cat((gates[:, before], branch_gates), 1))[0][
            :, last
        ]

    tensors = {"q": q[:, last], "branch_gates": gates[:, last], **keys}
    assert_right(op, tensors, torch.bfloat16)
    if T < 1 << 20:
        return
    leaves = [t.requires_grad_() for t in (q, gates, *keys.values())]
    out = attend(q, gates, **keys)[0]
    out.backward(torch.randn_like(out))
    assert out.isfinite().all() and all(t.grad.isfinite().all() for t in leaves)


def test_every_kernel_is_launched_for_the_sanitizer():
    """`make sanitize`, less the sanitizer."""
    printed(python(Path(__file__).parent / "scripts" / "sanitize.py", "--jobs", "8"))
