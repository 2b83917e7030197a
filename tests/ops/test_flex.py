"""The flex backend: how it is traced, what it refuses, and torch's limits. What it computes is in
the table (`test_table.py`)."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from native_sparse_attention import sliding_window_attention
from native_sparse_attention.config import AttentionConfig
from native_sparse_attention.masks import create_sliding_mask
from native_sparse_attention.ops import flex
from native_sparse_attention.ops.call import Call
from tests.helpers.calls import BRANCHES
from tests.helpers.calls import draw as draw_call

D, E = 8, 6  # widths of keys and of values


def draw(B, T, S, K, G, dtype=torch.float64, D=D, E=E, device="cpu") -> tuple[Tensor, ...]:
    shapes = (B, T, K * G, D), (B, S, K, D), (B, S, K, E)
    return tuple(torch.randn(shape, device=device).to(dtype) for shape in shapes)


def window(q: Tensor, k: Tensor, v: Tensor, w: int = 2, backend: str = "flex") -> Tensor:
    return sliding_window_attention(q, k, v, sliding_window_size=w, backend=backend)


@pytest.mark.parametrize("branch", BRANCHES)
def test_traced_by_torch(branch):
    """As a user on the CPU runs it."""
    call = draw_call(branch, num_initial_blocks=1) if branch == "selected" else draw_call(branch)
    torch.testing.assert_close(call("flex"), call("eager"), atol=1e-5, rtol=1e-5)


@pytest.mark.usefixtures("untraced_flex")
def test_indices_that_are_no_block_are_passed_over():
    call = draw_call("selected", place=(7, 7), selection_block_size=2, num_local_blocks=0)
    shape = call.settings["block_indices"].shape[:3]
    outs = []
    for blocks in ([0, 2], [-1, 2, 4, -7, 0, 99]):
        blocks = torch.tensor(blocks, dtype=torch.int32, device=call.tensors["q"].device)
        outs.append(call("flex", block_indices=blocks.expand(*shape, -1))[0])
    torch.testing.assert_close(*outs)


@pytest.mark.usefixtures("untraced_flex")
def test_under_a_mask_of_the_users():
    q, k, v = draw(2, 37, 37, 2, 3)
    mask = create_sliding_mask(37, 4, device="cpu")
    out = flex.attend_given_mask(Call(q, k, v), AttentionConfig(), mask)
    torch.testing.assert_close(out, window(q, k, v, 4))


def test_tensors_that_want_gradients_run_where_none_are_recorded():
    q, k, v = (t.requires_grad_() for t in draw(1, 5, 5, 1, 1))
    with torch.no_grad():
        assert not window(q, k, v).requires_grad
        assert flex.why_not("sliding_window_attention", Call(q, k, v)) == []
    with torch.inference_mode():
        window(q, k, v)


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="auto leaves flex out of graphs of CUDA")
@pytest.mark.parametrize("branch", BRANCHES)
def test_traces_without_a_break(branch):
    """Inside somebody's torch.compile, masks are made in the graph, at any length."""
    whole = draw_call(branch, place=(300, 300), memory=0)

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


# what it cannot do


def reasons(op="selected_attention", **changes) -> list[str]:
    return flex.why_not(op, Call(*draw(1, 3, 5, 1, 1)).but(**changes))


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


@pytest.mark.gpu
def test_gpu_why_not():
    q, k, v = draw(1, 3, 5, 1, 1, device="cuda")
    assert flex.why_not("selected_attention", Call(q, k, v)) == [
        "its CUDA kernels have no float64",
        "q has head width 8, needs at least 16",
        "v has head width 6, needs at least 16",
    ]
