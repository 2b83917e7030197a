"""What `backend="auto"` stands for; and the flex backend: how it is traced, what it refuses, and
torch's limits. What it computes is in the table (`test_table.py`)."""

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from native_sparse_attention import sliding_window_attention
from native_sparse_attention.config import AttentionConfig
from native_sparse_attention.ops import flex
from native_sparse_attention.ops.call import Call
from native_sparse_attention.ops.triton import backend as triton_backend
from tests.helpers.calls import BRANCHES, draw


@pytest.mark.gpu
@pytest.mark.parametrize("T", [8, 300])
def test_graphs_have_the_kernels(T):
    """Whatever the length: torch's compiler has given wrong values for the specification."""
    names = []

    def look(module, inputs):
        names.extend(str(node.target) for node in module.graph.nodes)
        return module.forward

    call = draw("layer", place=(T, T), batch=1)
    torch.compiler.reset()
    layer = torch.compile(call.op, backend=look, fullgraph=True, dynamic=False)
    layer(**call.tensors, **call.settings)
    assert any("native_sparse_attention" in name for name in names)


@pytest.mark.parametrize(
    "op, dtype, heads, width, T, s, held",
    [
        ("native_sparse_attention", torch.float32, 64, 192, 300, 64, 163),
        ("selected_attention", torch.float32, 32, 256, 300, 64, 99),
        ("decode_attention", torch.float32, 1, 256, 1, 64, 99),
        ("decode_attention", torch.float32, 16, 256, 4, 16, 99),
        ("decode_attention", torch.bfloat16, 64, 256, 1, 128, 99),
        ("native_sparse_attention", torch.bfloat16, 64, 256, 300, 128, None),
        ("native_sparse_attention", torch.float32, 64, 128, 300, 128, None),
        ("decode_attention", torch.float32, 64, 128, 16, 64, None),
    ],
)
def test_tiles_that_a_gpu_does_not_hold(monkeypatch, op, dtype, heads, width, T, s, held):
    """Are no error of a launch: `auto` takes another backend."""
    launch = pytest.importorskip("native_sparse_attention.kernels.common.launch")
    with FakeTensorMode():
        q, k = (
            torch.empty(1, n, h, width, dtype=dtype, device="cuda") for n, h in ((T, heads), (T, 1))
        )
    for memory in (99, 163, 227):
        monkeypatch.setattr(launch, "shared_memory", lambda memory=memory: memory * 1024)
        with torch.no_grad():
            config = AttentionConfig(selection_block_size=s, compress_block_sliding_stride=8)
            reasons = triton_backend.why_not(op, Call(q, k, k), config)
        if held is None or memory > held:
            assert not reasons
        else:
            (reason,) = reasons
            assert f"this GPU holds {memory * 1024}" in reason


@pytest.mark.parametrize("op", ["native_sparse_attention", "decode_attention"])
def test_only_a_ranking_counts_windows(op):
    """A call that ranks no blocks, or is given them, runs with any number of windows in a block."""
    sizes = dict(compress_block_size=1, compress_block_sliding_stride=1, selection_block_size=6)
    rule = dict(importance="max", ranking_bits=8, branches=("selected",), causal=True)
    q, indices = torch.randn(1, 8, 1, 16), torch.zeros(1, 8, 1, 2, dtype=torch.int32)
    for n, given, refused in ((2, None, True), (0, None, False), (2, indices, False)):
        config = AttentionConfig(**sizes, **rule, num_selected_blocks=n)
        reasons = triton_backend.why_not(op, Call(q, q, q, block_indices=given), config)
        assert any("needs a power of two" in reason for reason in reasons) == refused


@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels run on the GPU")
@pytest.mark.parametrize("branch", BRANCHES)
def test_triton_interpreter_has_no_bfloat16(branch):
    """It multiplies the bits of bfloat16 as integers: outputs near 1e9, without an error."""
    call = draw(branch, torch.bfloat16)
    with pytest.raises(NotImplementedError, match="q is bfloat16"):
        call("triton")
    torch.testing.assert_close(call(("triton", "eager")), call("eager"), rtol=0, atol=0)


D, E = 8, 6  # widths of keys and of values
CONFIG = AttentionConfig()


def tensors(B, T, S, K, G, dtype=torch.float64, D=D, E=E, device="cpu") -> tuple[Tensor, ...]:
    shapes = (B, T, K * G, D), (B, S, K, D), (B, S, K, E)
    return tuple(torch.randn(shape, device=device).to(dtype) for shape in shapes)


def window(q: Tensor, k: Tensor, v: Tensor, w: int = 2, backend: str = "flex") -> Tensor:
    return sliding_window_attention(q, k, v, sliding_window_size=w, backend=backend)


@pytest.mark.parametrize("branch", BRANCHES)
def test_traced_by_torch(branch):
    """As a user on the CPU runs it."""
    call = draw(branch, num_initial_blocks=1) if branch == "selected" else draw(branch)
    torch.testing.assert_close(call("flex"), call("eager"), atol=1e-5, rtol=1e-5)


@pytest.mark.usefixtures("untraced_flex")
def test_autocast_rounds_the_inputs_of_flex_attention():
    """To its dtype, once; and the output, as in eager PyTorch. The products stay float32."""
    inputs = tensors(1, 5, 5, 1, 2, torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        out = window(*inputs)
    torch.testing.assert_close(out, window(*(t.bfloat16() for t in inputs)), rtol=0, atol=0)


@pytest.mark.usefixtures("untraced_flex")
def test_tensors_that_want_gradients_run_where_none_are_recorded():
    q, k, v = (t.requires_grad_() for t in tensors(1, 5, 5, 1, 1))
    with torch.no_grad():
        assert not window(q, k, v).requires_grad
        assert flex.why_not("sliding_window_attention", Call(q, k, v), CONFIG) == []
    with torch.inference_mode():
        window(q, k, v)


@pytest.mark.skipif(torch.cuda.is_available(), reason="auto leaves flex out of graphs of CUDA")
@pytest.mark.slow
@pytest.mark.parametrize("branch", BRANCHES)
def test_traces_without_a_break(branch):
    """Inside somebody's torch.compile, masks are made in the graph, at any length."""
    whole = draw(branch, place=(300, 300), memory=0)

    def run(settings: dict, *tensors: Tensor) -> Tensor:
        named = dict(zip(whole.tensors, tensors))
        return whole.op(**named, **settings, backend="flex")[0]

    compiled = torch.compile(run, backend="eager", fullgraph=True)
    for length in (140, 300):
        settings, keys = dict(whole.settings), length
        if branch == "compressed":
            settings["seq_len"], keys = length, length // 4
        if branch == "selected":
            settings["block_indices"] = settings["block_indices"][:, :length]
        q, *others = whole.tensors.values()
        tensors = [q[:, :length], *(t[:, :keys] for t in others)]
        torch.testing.assert_close(compiled(settings, *tensors), run(settings, *tensors))


def reasons(op="selected_attention", **changes) -> list[str]:
    return flex.why_not(op, Call(*tensors(1, 3, 5, 1, 1)).but(**changes), CONFIG)


def test_why_not():
    q, k, v = tensors(1, 3, 5, 1, 1)
    assert reasons() == []
    assert reasons(v=None) == []
    assert reasons(q_offset=2) == []
    for changes, expected in (
        ({"q_offset": torch.tensor([2])}, "q_offset is a tensor"),
        ({"gates": torch.ones(1, 3, 1, 2)}, "use_diff_topk=True"),
        ({"v": v.clone().requires_grad_()}, "no gradients on cpu"),
        ({"q": q[:, :0]}, "q is empty, [1, 0, 1, 8]"),
        ({"q": q[:0], "k": k[:0], "v": v[:0]}, "q is empty, [0, 3, 1, 8]"),
        ({"k": k[:, :0], "v": v[:, :0]}, "k is empty, [1, 0, 1, 8]"),
        ({"q": q.to("meta")}, "q is on meta, needs cuda or cpu"),
    ):
        (reason,) = reasons(**changes)
        assert expected in reason
    # memory, or nothing, is still seen where there is no window yet
    assert reasons(op="compressed_attention", k=k[:, :0], v=v[:, :0]) == []


@pytest.mark.gpu
def test_gpu_why_not():
    q, k, v = tensors(1, 3, 5, 1, 1, device="cuda")
    assert flex.why_not("selected_attention", Call(q, k, v), CONFIG) == [
        "its CUDA kernels have no float64",
        "q has head width 8, needs at least 16",
        "v has head width 6, needs at least 16",
    ]
