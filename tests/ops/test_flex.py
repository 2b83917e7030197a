"""The flex backend against the reference, in fp64 on the CPU."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import Tensor

from native_sparse_attention.masks import create_sliding_mask
from native_sparse_attention.ops import flex, functional, reference

D, E = 8, 6  # widths of keys and of values

# B, T, S, K, G
SHAPES = [
    (1, 1, 1, 1, 1),
    (2, 1, 17, 2, 3),
    (1, 15, 15, 1, 4),
    (2, 16, 16, 2, 1),
    (1, 17, 33, 2, 3),
    (1, 13, 131, 1, 4),
    (1, 129, 129, 2, 1),
    (1, 131, 263, 1, 3),
]


def draw(B, T, S, K, G, dtype=torch.float64, D=D, E=E, device="cpu") -> tuple[Tensor, ...]:
    shapes = (B, T, K * G, D), (B, S, K, D), (B, S, K, E)
    return tuple(torch.randn(shape, device=device).to(dtype) for shape in shapes)


def assert_agrees(op: str, *args: Tensor, atol: float = 1e-12, **kwargs) -> Tensor:
    """Output and lse are the reference's, and empty rows 0 and -inf; returns the output."""
    kwargs.setdefault("scale", None)
    run = getattr(flex, op)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        out, lse = run(*args, **kwargs, return_lse=True)
    if op == "selected_attention":
        kwargs["gates"] = None
    expected, expected_lse = getattr(reference, op)(*args, **kwargs, return_lse=True)
    torch.testing.assert_close(out, expected, rtol=0, atol=atol)
    torch.testing.assert_close(lse, expected_lse, rtol=0, atol=atol)
    assert torch.equal(lse == -torch.inf, (out == 0).all(dim=-1))
    return out


def draw_indices(B, T, S, heads, n, s, offset, causal, full=False) -> Tensor:
    """Distinct blocks, past ones where causal, with empty slots; a tenth of rows are all empty."""
    num_blocks = -(-S // s)
    score = torch.rand(B, T, heads, num_blocks)
    if causal:
        own = ((torch.arange(T) + offset) // s)[:, None, None]
        score = score.masked_fill(torch.arange(num_blocks) >= own, -1.0)
    top, indices = score.topk(min(n, num_blocks), dim=-1)
    keep = (top > (0.0 if full else 0.3)) & (torch.rand(B, T, heads, 1) > 0.1)
    indices = torch.where(keep, indices, -1)
    return torch.nn.functional.pad(indices, (0, n - indices.shape[-1]), value=-1).to(torch.int32)


@pytest.mark.usefixtures("untraced_flex")
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("shape", SHAPES)
def test_sliding_window(shape, causal):
    _, T, S, _, _ = shape
    q, k, v = draw(*shape)
    for w in (0, 4, 300):
        for offset in {S - T, (S - T) // 2}:
            kwargs = {"sliding_window_size": w, "causal": causal, "q_offset": offset}
            assert_agrees("sliding_window_attention", q, k, v, **kwargs)


@pytest.mark.usefixtures("untraced_flex")
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("shape", SHAPES)
def test_selected(shape, causal):
    B, T, S, K, G = shape
    q, k, v = draw(*shape)
    offset = S - T
    # block size, initial and local blocks: half of the cases for each shape
    cases = [(1, 0, 1), (4, 1, 2), (24, 2, 0), (16, 0, 0)]
    for s, initial, local in cases[SHAPES.index(shape) % 2 :: 2]:
        for heads in {K, K * G}:
            indices = draw_indices(B, T, S, heads, 3, s, offset, causal)
            assert_agrees(
                "selected_attention",
                q,
                k,
                v,
                indices,
                selection_block_size=s,
                num_initial_blocks=initial,
                num_local_blocks=local,
                causal=causal,
                q_offset=offset,
            )


@pytest.mark.usefixtures("untraced_flex")
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("mem", [None, 1, 3])
@pytest.mark.parametrize("shape", SHAPES)
def test_compressed(shape, mem, causal):
    B, T, S, K, G = shape
    for d in (1, 16) if T > 100 else (4, 16):
        q, ck, cv = draw(B, T, S // d, K, G)
        mem_k = mem_v = None
        if mem is not None:
            mem_k = torch.randn(K, mem, D, dtype=q.dtype)
            mem_v = torch.randn(K, mem, E, dtype=q.dtype)
        kwargs = {"compress_block_sliding_stride": d, "mem_k": mem_k, "mem_v": mem_v}
        out = assert_agrees(
            "compressed_attention", q, ck, cv, causal=causal, q_offset=S - T, **kwargs
        )
        sees = torch.full((T,), mem is not None)
        sees |= (torch.arange(T) + S - T >= d) if causal else torch.tensor(S // d > 0)
        assert torch.equal((out != 0).all(dim=-1), sees[:, None].expand(B, -1, K * G))


def test_traced_by_torch():
    """As a user on the CPU runs it, one shape of each op."""
    q, k, v = draw(1, 17, 33, 2, 2)
    offset = {"causal": True, "q_offset": 16}
    assert_agrees("sliding_window_attention", q, k, v, sliding_window_size=4, **offset)
    indices = draw_indices(1, 17, 33, 2, 2, 4, 16, True)
    forced = {"num_initial_blocks": 1, "num_local_blocks": 1}
    assert_agrees(
        "selected_attention", q, k, v, indices, selection_block_size=4, **forced, **offset
    )
    memory = {"mem_k": torch.randn(2, 1, D).double(), "mem_v": torch.randn(2, 1, E).double()}
    windows = {"compress_block_sliding_stride": 4, **memory, **offset}
    assert_agrees("compressed_attention", q, k[:, :8], v[:, :8], **windows)


@pytest.mark.usefixtures("untraced_flex")
def test_scale_and_default_offset():
    q, k, v = draw(1, 5, 9, 1, 2)
    indices = draw_indices(1, 5, 9, 1, 2, 2, 4, True)
    window = {"sliding_window_size": 3, "causal": True}
    assert_agrees("sliding_window_attention", q, k, v, q_offset=4, scale=0.7, **window)
    out = flex.sliding_window_attention(q, k, v, **window)
    same = flex.sliding_window_attention(q, k, v, q_offset=4, scale=D**-0.5, **window)
    torch.testing.assert_close(out, same)
    out = flex.selected_attention(q, k, v, indices, selection_block_size=2)
    same = flex.selected_attention(q, k, v, indices, selection_block_size=2, q_offset=4)
    torch.testing.assert_close(out, same)


def test_indices_that_are_no_block_are_passed_over():
    q, k, v = draw(1, 7, 7, 1, 1)
    kwargs = {"selection_block_size": 2, "causal": False, "num_local_blocks": 0}
    found = torch.tensor([0, 2]).expand(1, 7, 1, 2)
    cluttered = torch.tensor([-1, 2, 4, -7, 0, 99]).expand(1, 7, 1, 6)
    torch.testing.assert_close(
        flex.selected_attention(q, k, v, cluttered.int(), **kwargs),
        flex.selected_attention(q, k, v, found.int(), **kwargs),
    )


def test_all_blocks_is_dense_causal_attention():
    q, k, v = draw(1, 37, 37, 2, 2)
    indices = torch.arange(10, dtype=torch.int32).expand(1, 37, 2, -1)
    out = flex.selected_attention(q, k, v, indices, selection_block_size=4)
    dense = torch.nn.functional.scaled_dot_product_attention(
        *(t.transpose(1, 2) for t in (q, k, v)), is_causal=True, enable_gqa=True
    )
    torch.testing.assert_close(out, dense.transpose(1, 2))


@pytest.mark.usefixtures("untraced_flex")
def test_under_a_mask_of_the_users():
    q, k, v = draw(2, 37, 37, 2, 3)
    mask = create_sliding_mask(37, 4, device="cpu")
    expected = flex.sliding_window_attention(q, k, v, sliding_window_size=4)
    torch.testing.assert_close(flex.under_mask(q, k, v, mask, None), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_low_precision_keeps_its_dtype_and_lse_is_fp32(dtype):
    q, k, v = draw(1, 37, 37, 2, 2, dtype)
    out, lse = flex.sliding_window_attention(q, k, v, sliding_window_size=5, return_lse=True)
    assert (out.dtype, lse.dtype) == (dtype, torch.float32)
    exact = reference.sliding_window_attention(
        q.double(), k.double(), v.double(), sliding_window_size=5, causal=True, q_offset=0
    )
    torch.testing.assert_close(out.double(), exact, rtol=0, atol=4 * torch.finfo(dtype).eps)


def test_tensors_that_want_gradients_run_where_none_are_recorded():
    q, k, v = (t.requires_grad_() for t in draw(1, 5, 5, 1, 1))
    with torch.no_grad():
        out = flex.sliding_window_attention(q, k, v, sliding_window_size=2)
        assert flex.why_not("sliding_window_attention", q, k, v) == []
    assert not out.requires_grad
    with torch.inference_mode():
        flex.sliding_window_attention(q, k, v, sliding_window_size=2)


@pytest.mark.slow
@pytest.mark.parametrize("op", ["sliding_window", "selected", "compressed"])
def test_traces_without_a_break(op):
    """Inside somebody's torch.compile, masks are made in the graph, at any length."""
    indices = draw_indices(1, 300, 300, 2, 2, 16, 0, True)

    def run(q: Tensor, k: Tensor, v: Tensor, indices: Tensor) -> Tensor:
        if op == "sliding_window":
            return flex.sliding_window_attention(q, k, v, sliding_window_size=5)
        if op == "selected":
            return flex.selected_attention(q, k, v, indices, selection_block_size=16)
        return flex.compressed_attention(q, k, v, compress_block_sliding_stride=4)

    compiled = torch.compile(run, backend="eager", fullgraph=True)
    for length in (140, 300):
        q, k, v = draw(1, length, length, 2, 2)
        rows = indices[:, :length]
        torch.testing.assert_close(compiled(q, k, v, rows), run(q, k, v, rows))


# what it cannot do


def reasons(**changes) -> list[str]:
    q, k, v = draw(1, 3, 5, 1, 1)
    call = {"op": "selected_attention", "q": q, "k": k, "v": v} | changes
    return flex.why_not(**call)


def test_why_not():
    q, k, v = draw(1, 3, 5, 1, 1)
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


def test_torch_still_has_no_gradients_on_the_cpu():
    """The day this fails, `why_not` is due for a change."""
    if torch.__version__.startswith(("2.8.", "2.9.")):
        pytest.skip("torch 2.8 and 2.9 have them, later versions do not")
    q, k, v = (t.requires_grad_() for t in draw(1, 3, 3, 1, 1))
    with pytest.raises(NotImplementedError, match="does not support backward on CPU"):
        flex.sliding_window_attention(q, k, v, sliding_window_size=2)


# on a GPU

GPU_SHAPES = [(1, 1, 129, 2, 4), (2, 17, 17, 1, 3), (1, 257, 300, 2, 1), (1, 640, 640, 1, 16)]


@pytest.mark.gpu
@pytest.mark.parametrize("shape", GPU_SHAPES)
@pytest.mark.parametrize("causal", [True, False])
def test_gpu_agrees_with_reference(shape, causal):
    """Outputs, lse and gradients in fp32, each op in turn, rows without keys included."""
    B, T, S, K, G = shape
    s, d, offset = 16, 8, S - T
    indices = draw_indices(B, T, S, K, 3, s, offset, causal).cuda()
    window = {"sliding_window_size": 20, "causal": causal, "q_offset": offset}
    selected = {"selection_block_size": s, "causal": causal, "q_offset": offset}
    selected |= {"num_initial_blocks": 0, "num_local_blocks": 0}
    compressed = {"compress_block_sliding_stride": d, "causal": causal, "q_offset": offset}

    for op, extra, kwargs in (
        ("sliding_window_attention", (), window),
        ("selected_attention", (indices,), selected),
        ("compressed_attention", (), compressed | {"mem_k": None, "mem_v": None}),
    ):
        length = S // d if op == "compressed_attention" else S
        q, k, v = draw(B, T, length, K, G, torch.float32, D=64, E=32, device="cuda")
        leaves = [t.requires_grad_() for t in (q, k, v)]
        exact = [t.detach().double().requires_grad_() for t in leaves]
        out, lse = getattr(flex, op)(*leaves, *extra, **kwargs, return_lse=True)
        more = {"gates": None} if op == "selected_attention" else {}
        expected, expected_lse = getattr(reference, op)(
            *exact, *extra, **kwargs, **more, return_lse=True
        )
        close = {"rtol": 0, "atol": 2e-3}
        torch.testing.assert_close(out.double(), expected, **close)
        torch.testing.assert_close(lse.double(), expected_lse, **close)
        bwd = torch.randn_like(out)
        grads = torch.autograd.grad(out, leaves, bwd)
        expected_grads = torch.autograd.grad(expected, exact, bwd.double())
        for grad, expected_grad in zip(grads, expected_grads, strict=True):
            torch.testing.assert_close(grad.double(), expected_grad, **close)


@pytest.mark.gpu
@pytest.mark.parametrize("extra", [{}, dict(soft_cap=2.0), dict(sinks=True)], ids=str)
@pytest.mark.parametrize("causal", [True, False])
def test_gpu_documents_caps_and_sinks(causal, extra):
    """The public operations over packed documents, outputs and gradients, sinks' own included."""
    cu_seqlens = torch.tensor([0, 200, 200, 201, 330, 337], device="cuda")
    T, d = 337, 8
    windows = sum(-(-n // d) if not causal else n // d for n in cu_seqlens.diff().tolist())
    lists = torch.rand(1, T, 2, 25, device="cuda").argsort(-1)[..., :3].to(torch.int32)
    call = dict(causal=causal, cu_seqlens=cu_seqlens, **extra)
    selected = dict(selection_block_size=8, num_initial_blocks=1, num_local_blocks=2)
    for op, length, kwargs in (
        (functional.sliding_window_attention, T, dict(sliding_window_size=40)),
        (functional.selected_attention, T, dict(block_indices=lists, **selected)),
        (functional.compressed_attention, windows, dict(compress_block_sliding_stride=d)),
    ):
        tensors = draw(1, T, T, 2, 4, torch.float32, D=64, E=32, device="cuda")
        tensors = [tensors[0], *(t[:, :length] for t in tensors[1:])]
        if "sinks" in extra:
            tensors.append(torch.randn(8, device="cuda"))
        results = []
        for dtype, backend in ((torch.float32, "flex"), (torch.float64, "eager")):
            leaves = [t.detach().to(dtype).requires_grad_() for t in tensors]
            given = {**kwargs, **call} | ({"sinks": leaves[3]} if "sinks" in extra else {})
            out = op(*leaves[:3], backend=backend, **given)
            weights = torch.linspace(-1, 1, out.numel(), device="cuda").view(out.shape)
            grads = torch.autograd.grad((out * weights.to(dtype)).sum(), leaves)
            results.append([out, *grads])
        for got, right in zip(*results, strict=True):
            atol = 2e-3 * max(1.0, right.abs().max().item())
            torch.testing.assert_close(got.double(), right, rtol=0, atol=atol)


@pytest.mark.gpu
def test_gpu_decodes_without_recompiling_for_every_length():
    q, k, v = draw(1, 1, 600, 2, 4, torch.bfloat16, D=64, E=64, device="cuda")
    for length in range(3, 600, 7):
        out = flex.sliding_window_attention(q, k[:, :length], v[:, :length], sliding_window_size=9)
        expected = reference.sliding_window_attention(
            q, k[:, :length], v[:, :length], sliding_window_size=9, causal=True, q_offset=length - 1
        )
        torch.testing.assert_close(out, expected, rtol=0, atol=2e-2)


@pytest.mark.gpu
def test_gpu_why_not():
    q, k, v = draw(1, 3, 5, 1, 1, device="cuda")
    assert flex.why_not("selected_attention", q, k, v) == [
        "its CUDA kernels have no float64",
        "q has head width 8, needs at least 16",
        "v has head width 6, needs at least 16",
    ]
