"""`chunked_attention`: its memory, on a GPU too, and what it refuses."""

import pytest
import torch

from native_sparse_attention import SegmentIds, chunked_attention
from tests.dense.test_chunked import causal_mask, dense, draw
from tests.helpers import memory

# memory


def step(T, device="cpu", **kwargs):
    leaves = draw(1, T, T, 2, 1, 8, 8, torch.float32, device)
    return lambda: chunked_attention(*leaves, causal=True, **kwargs).sum().backward()


def test_memory_is_linear_on_the_cpu():
    sizes = dict(q_chunk_size=64, k_chunk_size=64)
    peaks = [memory.peak(step(T, **sizes)) for T in (512, 2048)]
    assert peaks[1] < 5 * peaks[0], peaks
    # one chunk is a dense softmax: the measure notices
    dense_peaks = [memory.peak(step(T, q_chunk_size=T, k_chunk_size=T)) for T in (512, 2048)]
    assert dense_peaks[1] > 12 * dense_peaks[0], dense_peaks


@pytest.mark.gpu
def test_memory_is_linear_on_a_gpu():
    step(64, "cuda")()
    peaks = [memory.cuda_peak(step(T, "cuda")) for T in (16384, 65536)]
    assert peaks[1] < 5 * peaks[0], peaks


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_within_budget_on_a_gpu(dtype):
    leaves = draw(2, 777, 777, 4, 2, 64, 64, dtype, "cuda")
    exact, _ = dense(*(t.detach().double().cpu() for t in leaves), causal_mask(777, 777))
    low, _ = dense(*(t.detach() for t in leaves), causal_mask(777, 777).cuda())
    out = chunked_attention(*leaves, causal=True, q_chunk_size=128, k_chunk_size=256)
    budget = 2 * (low.double().cpu() - exact).abs().max()
    budget += torch.finfo(dtype).eps * exact.abs().max()
    assert (out.double().cpu() - exact).abs().max() <= budget


# refusals


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(q_chunk_size=0), "q_chunk_size must be an integer of at least 1, got 0"),
        (dict(k_chunk_size=2.0), "k_chunk_size must be an integer of at least 1, got 2.0"),
        (dict(sliding_window_size=-1), "sliding_window_size must be an integer of at least 0"),
        (dict(soft_cap=0.0), "soft_cap must be a number above 0 or None, got 0.0"),
        (dict(soft_cap=float("nan")), "soft_cap must be a number above 0 or None, got nan"),
        (
            dict(mask=torch.ones(6, 5)),
            "mask must be a bool tensor on cpu, got a torch.float32 tensor",
        ),
        (
            dict(mask=torch.ones(6, 5, dtype=torch.bool)),
            r"mask must broadcast to \[B H T S\] = \[2, 4, 5, 6\], got \[6, 5\]",
        ),
        (dict(mask_mod=3), r"mask_mod must be a function of \(b, h, i, j\) or None, got 3"),
        (
            dict(mask_mod=lambda b, h, i, j: i + j),
            "what mask_mod returns must be a bool tensor on cpu, got a torch.int64 tensor",
        ),
        (
            dict(mask_mod=lambda b, h, i, j: torch.ones(9, dtype=torch.bool)),
            r"what mask_mod returns must broadcast to \[b h i j\] = \[2, 4, 5, 6\], got \[9\]",
        ),
        (dict(segment_ids=torch.zeros(2, 5, dtype=torch.long)), "one tensor for T=5 and S=6"),
        (
            dict(segment_ids=(torch.zeros(2, 5), torch.zeros(2, 6))),
            "segment_ids.q must be integers on cpu, got torch.float32",
        ),
        (
            dict(segment_ids=SegmentIds(torch.zeros(2, 5).long(), torch.zeros(2, 7).long())),
            r"segment_ids.kv must have shape \[2, 6\], got \[2, 7\]",
        ),
        (dict(segment_ids="ab"), "segment_ids must be SegmentIds"),
        (dict(q_offset=1.5), "q_offset must be an int or a tensor"),
        (dict(q_offset=torch.zeros(3).long()), r"integer tensor of shape \[2\]"),
        (dict(v=torch.zeros(2, 7, 2, 4)), "v has S=7 but k has S=6"),
        (dict(v=torch.zeros(2, 6, 2, 4).half()), "v is torch.float16 but q is torch.float32"),
        (dict(k=torch.zeros(2, 6, 3, 4), v=torch.zeros(2, 6, 3, 4)), "multiple of kv_heads"),
        (dict(q=None), "q must be a tensor"),
    ],
)
def test_refusals(change, message):
    tensors = dict(zip("qkv", draw(2, 5, 6, 4, 2, 4, 4, torch.float32), strict=True))
    with pytest.raises(ValueError, match=message):
        chunked_attention(**(tensors | change))
