"""A step of decoding at the sizes that people use, in every dtype, by row and by page, and many
programs that wait for one another: on a GPU."""

import pytest
import torch

from native_sparse_attention.ops.decode import decode_attention, workspace
from tests.helpers.budget import DEVICE
from tests.helpers.sizes import sizes
from tests.kernels.decode.test_decode import assert_right, problem

pytestmark = pytest.mark.gpu

WIDE = sizes(
    32, 16, 64, n=13, w=511, num_initial_blocks=1, num_local_blocks=2, N=8192,
    lengths=(8000, 77, 4095),
)  # fmt: skip


HEADS = [
    (torch.bfloat16, (64, 4, 128, 128)), (torch.bfloat16, (6, 2, 80, 48)),
    (torch.bfloat16, (8, 8, 64, 64)), (torch.float16, (5, 1, 256, 256)),
    (torch.float16, (64, 1, 192, 128)), (torch.float32, (8, 2, 64, 64)),
]  # fmt: skip


@pytest.mark.parametrize("importance", ["logits", "probs"])
@pytest.mark.parametrize("T", [1, 4, 16])
@pytest.mark.parametrize("dtype, heads", HEADS, ids=str)
def test_heads_and_dtypes(dtype, heads, T, importance):
    assert_right(dtype, T=T, heads=heads, importance=importance, **WIDE)
    assert_right(dtype, T=T, heads=heads, importance=importance, page=256, sinks=True, **WIDE)


@pytest.mark.parametrize("T", [1, 4, 16])
@pytest.mark.parametrize("dtype, heads", [HEADS[0], HEADS[5]], ids=str)
@pytest.mark.parametrize("index_dim", [16, 32, 64, 256])
def test_index_widths(dtype, heads, T, index_dim):
    call = dict(T=T, heads=heads, index=(heads[1], index_dim), memory=0, branches=("selected",))
    assert_right(dtype, **call, page=256, **WIDE)


@pytest.mark.parametrize("N, T", [(2048, 4), (4096, 1), (8192, 1), (16384, 1), (32768, 1)])
@pytest.mark.parametrize("dtype, heads", [HEADS[0], HEADS[1], HEADS[5]], ids=str)
def test_heads_and_dtypes_of_short_rows(dtype, heads, N, T):
    """Of which every block is read, or several programs rank the blocks."""
    for length in (N - 64, N // 2 + 7, 3):
        short = dict(T=T, heads=heads, **{**WIDE, "N": N, "lengths": (length,)})
        assert_right(dtype, sinks=True, memory=2, **short)
        assert_right(dtype, page=256, soft_cap=3.0, counts=(T - T // 3,), **short)


@pytest.mark.parametrize("importance", ["logits", "probs"])
@pytest.mark.parametrize("B", [4, 200])
def test_programs_that_wait_for_one_another(importance, B):
    """Few, or far more than a GPU runs at once, two steps side by side: none waits for ever, and
    no two runs differ."""
    lengths = [1017 - 5 * b for b in range(B)]
    rows = dict(WIDE, N=1024, lengths=lengths, importance=importance)
    T = 4 if B > 4 else 1
    tensors, settings = problem(torch.float16, T=T, heads=(32, 2, 64, 64), **rows)
    streams = [torch.cuda.Stream() for _ in range(2)]
    counters = [workspace(B, 2, DEVICE) for _ in streams]
    call, outs = dict(**tensors, **settings, backend="triton"), []
    torch.cuda.synchronize()
    for _ in range(20):
        for stream, zeros in zip(streams, counters):
            with torch.cuda.stream(stream):
                outs.append(decode_attention(**call, counters=zeros))
    torch.cuda.synchronize()
    assert all(torch.equal(out, outs[0]) for out in outs)
    few = {n: t[:3] for n, t in tensors.items() if n not in ("mem_k", "mem_v")}
    few |= {n: tensors[n] for n in ("mem_k", "mem_v")}
    settings["lengths"] = settings["lengths"][:3]
    alone = decode_attention(**few, **settings, backend="triton")
    torch.testing.assert_close(outs[0][:3], alone, atol=2e-3, rtol=0)
