"""Training on a CUDA device, over what `auto` chooses there: a step captured in a CUDA graph,
float16 with a scaler, one compilation for all lengths, and very long sequences."""

import copy
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from native_sparse_attention import SparseAttention, native_sparse_attention, select_blocks
from tests.helpers.budget import assert_right
from tests.helpers.calls import Call, under_selection

pytestmark = pytest.mark.gpu

DIM = 128


def attention(**settings):
    """Of as many selected blocks as there are, so that nothing hangs on near-ties."""
    torch.manual_seed(0)
    kwargs = dict(
        dim=DIM, dim_head=64, heads=8, kv_heads=2, sliding_window_size=63, compress_block_size=32,
        compress_block_sliding_stride=16, selection_block_size=64, num_selected_blocks=32,
        causal=True,
    )  # fmt: skip
    module = SparseAttention(**kwargs | settings).cuda()
    with torch.no_grad():
        for p in (module.compress_mem_kv, module.k_intrablock_positions):
            p.copy_(torch.randn_like(p))
    return module


def draw(length):
    return torch.randn(2, length, DIM, device="cuda")


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

    module = attention(num_selected_blocks=2, **settings)
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
    """Nothing overflows, gradients are those of float32, and it learns."""
    module = attention()
    exact = copy.deepcopy(module)
    x = draw(300)
    target = x.roll(1, 1)
    F.mse_loss(exact(x), target).backward()
    optimizer = torch.optim.Adam(module.parameters(), lr=3e-3)
    scaler = torch.amp.GradScaler("cuda")
    losses = []
    for step in range(20):
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            out = module(x)
        loss = F.mse_loss(out.float(), target)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        if step == 0:
            for (name, p), q in zip(module.named_parameters(), exact.parameters()):
                assert p.grad.isfinite().all(), name
                assert (p.grad - q.grad).norm() <= 0.05 * q.grad.norm() + 1e-6, name
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
    assert scaler.get_scale() == 2.0**16
    assert losses[-1] < 0.95 * losses[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_compiled_for_all_lengths(dtype):
    """One graph, compiled at most twice, forward and backward, that errs no more than twice as much
    as without compiling, against fp64."""
    from torch._inductor.compile_fx import compile_fx

    module, graphs = attention().to(dtype), []
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


SETTINGS = dict(
    compress_block_size=32, compress_block_sliding_stride=16, selection_block_size=64,
    num_selected_blocks=13, num_initial_blocks=1, num_local_blocks=2, sliding_window_size=511,
)  # fmt: skip


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
        return native_sparse_attention(
            q, **keys, branch_gates=branch_gates, recompute=True, return_indices=True,
            backend="triton", **SETTINGS,
        )  # fmt: skip

    with torch.no_grad():
        lists = attend(q, gates, **keys)[1][:, last].clone()
    exact = select_blocks(
        q[:, last].double(), keys["ck"].double(), seq_len=T, backend="eager",
        **{n: value for n, value in SETTINGS.items() if n != "sliding_window_size"},
    )  # fmt: skip
    same = lists.sort(dim=-1).values == exact.sort(dim=-1).values
    assert same.double().mean() > 0.98  # but for near-ties

    specification = under_selection(Call(native_sparse_attention, {}, SETTINGS), lists)

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
    root = Path(__file__).parent.parent
    done = subprocess.run(
        [sys.executable, root / "tests" / "scripts" / "sanitize.py", "--jobs", "8"],
        cwd=root,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(root), *sys.path])},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
