"""Compiles two kernels ahead, side by side, for a GPU that is not there, and prints what it saw."""

import json

import torch
import triton
import triton.language as tl
from compile_kernels import Driver
from triton.runtime import driver

from native_sparse_attention.kernels.common import precompile


@triton.jit
def add(x, y, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + i, tl.load(x + i, mask=i < n) + 1, mask=i < n)


@triton.jit
def wrong(x, BLOCK: tl.constexpr):
    tl.store(x + tl.arange(0, BLOCK), tl.zeros([2 * BLOCK], tl.float32))


def main() -> None:
    driver.set_active(Driver(90))
    x = torch.zeros(64)

    def run() -> None:
        for block in (16, 32, 16):
            precompile.launcher(add, (4,))(x, x, 64, BLOCK=block)

    found = {"possible": precompile.is_possible()}
    if found["possible"]:
        found["first"] = precompile.compile_ahead(run)
        found["again"] = precompile.compile_ahead(run)
        found["ignored"] = precompile.compile_ahead(
            lambda: precompile.launcher(wrong, (1,))(x, BLOCK=16)
        )
        found["values"] = x.sum().item()  # nothing was launched
        found["mode"] = precompile.active_mode.get() is not None
    print(json.dumps(found))


if __name__ == "__main__":
    main()
