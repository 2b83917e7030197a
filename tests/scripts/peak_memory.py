"""Peak memory of a training step's attention on a Hopper, without one: launches do nothing, tensors
are the CPU's, and what they take is counted as they come and go.

    TRITON_INTERPRET=0 python tests/scripts/peak_memory.py 8192:32/8:1 8192:32/8:16

Prints MiB of the forward and the backward pass over the benchmark's problem, of so many tokens,
heads and tokens to a ranking: inputs and gradients included, as `benchmarks.attention` counts them.
"""

import json
import sys

import compile_kernels
import torch

from benchmarks.problem import Setting
from native_sparse_attention.config import AttentionConfig
from native_sparse_attention.ops.call import Call
from native_sparse_attention.ops.triton import backend
from tests.helpers import memory


def step(at: Setting) -> None:
    W = at.T // at.d
    shapes = [(at.T, at.H), (at.T, at.K), (at.T, at.K), (W, at.K), (W, at.K)]
    tensors = [
        torch.empty(1, n, heads, at.D, dtype=at.dtype, requires_grad=True) for n, heads in shapes
    ]
    gates = torch.empty(1, at.T, at.H, 3, dtype=at.dtype, requires_grad=True)
    d_out = torch.empty(1, at.T, at.H, at.D, dtype=at.dtype)
    config = AttentionConfig(sliding_window_size=at.w, causal=True, **at.ranking)
    out, _ = backend.native_sparse_attention(Call(*tensors, gates, q_offset=0), config)
    torch.autograd.grad(out, [*tensors, gates], d_out)


if __name__ == "__main__":
    compile_kernels.stand_in(90, lambda *_, **__: None)
    for case in sys.argv[1:]:
        T, heads, stride = case.split(":")
        H, K = heads.split("/")
        at = Setting(int(T), int(H), int(K), stride=int(stride))
        print(json.dumps([case, memory.peak(lambda at=at: step(at)) / 2**20]))
