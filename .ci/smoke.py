"""What the installed wheel must do where there is no triton, no GPU and no repository."""

import sys
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path

import torch

import native_sparse_attention
from native_sparse_attention import SparseAttention

package = Path(native_sparse_attention.__file__)
assert package.is_relative_to(sys.prefix), f"imported {package}, not the installed wheel"
assert files("native_sparse_attention").joinpath("py.typed").is_file(), "the wheel lacks py.typed"
assert find_spec("triton") is None, "triton is installed: this environment proves nothing"

torch.manual_seed(0)
layer = SparseAttention(
    dim=32,
    dim_head=8,
    heads=4,
    kv_heads=2,
    sliding_window_size=4,
    compress_block_size=8,
    compress_block_sliding_stride=4,
    selection_block_size=8,
    num_selected_blocks=2,
    causal=True,
)
x = torch.randn(2, 37, 32, requires_grad=True)
out = layer(x)
out.sum().backward()

assert out.shape == x.shape, out.shape
assert torch.isfinite(out).all() and torch.isfinite(x.grad).all()
print(f"{package.parent}: forward and backward of {tuple(x.shape)} on {out.device}, no triton")
