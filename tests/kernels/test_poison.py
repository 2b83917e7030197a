"""The Triton kernels read nothing that nothing has written: in memory that holds NaN they give the
same bits, forward and backward."""

import pytest
import torch

from benchmarks.problem import pooled
from native_sparse_attention import (
    compressed_attention,
    native_sparse_attention,
    select_blocks,
    selected_attention,
    sliding_window_attention,
)
from tests.helpers.budget import CUDA, DEVICE
from tests.helpers.memory import poisoned
from tests.helpers.selections import sizes

pytest.importorskip("triton")

from native_sparse_attention.kernels.common import launch

pytestmark = pytest.mark.kernels

if CUDA:
    # by kernels of a Hopper and, of a length that fills no block, by others
    LENGTHS, L, D, S, N, W, E = (512, 331), 32, 16, 64, 3, 255, 128
    HEADS, DTYPES = [(32, 2), (8, 2), (2, 2)], [torch.bfloat16, torch.float16]
else:
    LENGTHS, L, D, S, N, W, E = (19,), 8, 4, 8, 2, 9, 16
    HEADS, DTYPES = [(2, 1), (9, 1)], [torch.float32]
SIZES = dict(sizes(L, D, S), num_selected_blocks=N)
FORCED = dict(num_initial_blocks=1, num_local_blocks=2)


def leaf(*shape):
    return torch.rand(shape, device=DEVICE, requires_grad=True)


class Problem:
    """Inputs of a length."""

    def __init__(self, heads, dtype, T):
        (H, K), self.T, self.dtype = heads, T, dtype
        self.q, self.k, self.v = (self.draw(1, T, h, E) for h in (H, K, K))
        self.ck, self.cv = (pooled(t.detach(), L, D).requires_grad_() for t in (self.k, self.v))
        self.memory = {name: self.draw(K, 2, E) for name in ("mem_k", "mem_v")}
        self.gates = self.draw(1, T, H, 3)
        self.lists = torch.randint(-1, -(-T // S), (1, T, K, N), device=DEVICE).int()
        self.lists[:, :D] = -1

    def draw(self, *shape):
        return torch.randn(shape, device=DEVICE).to(self.dtype).requires_grad_()

    def window(self, **settings):
        return sliding_window_attention(
            self.q, self.k, self.v, sliding_window_size=W, backend="triton", **settings
        )

    def compressed(self, **settings):
        return compressed_attention(
            self.q, self.ck, self.cv, compress_block_sliding_stride=D, seq_len=self.T,
            backend="triton", **settings,
        )  # fmt: skip

    def selected(self, **settings):
        return selected_attention(
            self.q, self.k, self.v, self.lists, selection_block_size=S, backend="triton", **settings
        )

    def ranked(self, **settings):
        return select_blocks(
            self.q,
            self.ck,
            return_gates=True,
            seq_len=self.T,
            backend="triton",
            **SIZES,
            **settings,
        )

    def layer(self, **settings):
        return native_sparse_attention(
            self.q, self.k, self.v, self.ck, self.cv, self.gates, return_indices=True,
            sliding_window_size=W, backend="triton", **SIZES, **settings,
        )  # fmt: skip


CASES = {
    "window": lambda at: at.window(return_lse=True),
    "window, two-sided": lambda at: at.window(causal=False),
    "compressed": lambda at: at.compressed(return_lse=True),
    "compressed, memory": lambda at: at.compressed(
        **at.memory, sinks=leaf(at.q.shape[2]), soft_cap=3.0
    ),
    "selected": lambda at: at.selected(return_lse=True, num_local_blocks=0),
    "selected, forced": lambda at: at.selected(**FORCED, sinks=leaf(at.q.shape[2])),
    "selected, gates": lambda at: at.selected(gates=leaf(*at.lists.shape).to(at.dtype)),
    "ranked": lambda at: at.ranked(),
    "ranked, probs": lambda at: at.ranked(importance="probs", **FORCED),
    "ranked, interpolated": lambda at: at.ranked(interpolated_importance_score=True),
    "layer": lambda at: at.layer(**FORCED),
    "layer, probs": lambda at: at.layer(importance="probs", **at.memory),
    "layer, 4 tokens": lambda at: at.layer(
        selection_stride=4, use_diff_topk=True, sinks=leaf(3, at.q.shape[2])
    ),
    "layer, its own window": lambda at: at.layer(
        window_k=at.k * 0.5, window_v=at.v * 0.5, cq=at.q * 0.5, recompute=True,
        query_heads_share_selected_kv=False,
    ),
    "layer, documents": lambda at: at.layer(
        cu_seqlens=torch.tensor([0, at.T // 3 // D * D, at.T], device=DEVICE), **FORCED
    ),
}  # fmt: skip


# in the interpreter few of many heads a KV head, whose lists are walked query by query
RUNS = [
    (case, heads)
    for case in CASES
    for heads in HEADS
    if CUDA or heads == HEADS[0] or case in ("selected", "selected, gates", "layer")
]


def results(call, problem):
    """All that a call gives, and the gradients of what has some."""
    torch.manual_seed(1)
    given = call(problem)
    given = given if isinstance(given, tuple) else (given,)
    outs = [t for t in given if t.requires_grad]
    weights = [torch.linspace(-1, 1, t.numel(), device=DEVICE).view(t.shape).to(t) for t in outs]
    leaves = [problem.q, problem.k, problem.v, problem.ck, problem.cv, problem.gates]
    leaves += problem.memory.values()
    finite = [t.masked_fill(t.isneginf(), 0.0) for t in outs]
    grads = torch.autograd.grad(finite, leaves, weights, materialize_grads=True, allow_unused=True)
    return [*given, *grads]


@pytest.mark.slow(one_of=6)
@pytest.mark.parametrize("T", LENGTHS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case, heads", RUNS, ids=str)
def test_the_same_bits(case, heads, dtype, T):
    problem = Problem(heads, dtype, T)
    with launch.using(
        dict.fromkeys(
            (
                "flash_sm90",
                "union_sm90",
                "softmax_mass_sm90",
            ),
            True,
        )
    ):
        expected = results(CASES[case], problem)
        with poisoned():
            found = results(CASES[case], problem)
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other) and not one.isnan().any()
