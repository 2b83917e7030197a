"""Combination of the three branches by gates, forward and backward, and delta, which the branches'
backward subtracts from dp."""

from collections import namedtuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .common import launch
from .common.launch import BackwardInputs, cdiv
from .common.precompile import launcher
from .common.primitives import Combine, Gates, finite_log2, load_rows, store_combined

# rows of a program: forward, and backward, which reads more per row
BLOCK_ROWS, BACKWARD_ROWS = 32, 16

Settings = namedtuple("Settings", "E BLOCK_E BLOCK_M")


@triton.jit(do_not_specialize=["ROWS", "T"])
def nsa_combine_fwd(sel, combine, ROWS, H, T, F: tl.constexpr):
    """One program: M rows of `out = g_cmp cmp + g_sel sel + g_win win`."""
    row = tl.program_id(0).to(tl.int64) * F.BLOCK_M + tl.arange(0, F.BLOCK_M)
    real, b, token = row < ROWS, row // H // T, row // H % T
    sel_rows = load_rows(sel, row * F.E, F.E, F.BLOCK_E, real).to(tl.float32)
    store_combined(combine, sel_rows, b, token, row % H, row, F.E, F.BLOCK_E, real)


@triton.jit(do_not_specialize=["ROWS", "T"])
def nsa_combine_bwd(outs, lses, gates, d_out, d_gates, delta, gated, ROWS, H, T, F: tl.constexpr):
    """One program: M rows of `d_gate_b = sum(out_b * d_out)` [ROWS, 3], and of the gated backward
    inputs (`launch.BackwardInputs`) of each branch [3, ROWS]. delta is the same sum in float32, its
    last bit set where the gate is negative. `gated` is lse minus log2 of the gate's size, in units
    of log2."""
    row = tl.program_id(0).to(tl.int64) * F.BLOCK_M + tl.arange(0, F.BLOCK_M)
    real = row < ROWS
    gate = gates.ptr + row // H // T * gates.b + row // H % T * gates.t + row % H * gates.h
    do = load_rows(d_out, row * F.E, F.E, F.BLOCK_E, real).to(tl.float32)
    tiles, logs, sizes = (), (), ()
    for branch in tl.static_range(3):  # all loads before any store, which may alias them
        tiles += (load_rows(outs[branch], row * F.E, F.E, F.BLOCK_E, real),)
        logs += (tl.load(lses[branch] + row, mask=real, other=0.0),)
        sizes += (tl.load(gate + branch * gates.branch, mask=real, other=0.0),)
    for branch in tl.static_range(3):
        d_gate = tl.sum(tiles[branch].to(tl.float32) * do, 1)
        log, g = logs[branch], sizes[branch].to(tl.float32)
        tl.store(d_gates + row * 3 + branch, d_gate.to(d_gates.dtype.element_ty), mask=real)
        offset = branch * tl.cast(ROWS, tl.int64) + row
        bits = d_gate.to(tl.int32, bitcast=True) & -2 | (g < 0.0).to(tl.int32)
        tl.store(delta + offset, bits.to(tl.float32, bitcast=True), mask=real)
        size = tl.log2(tl.where(g < 0.0, -g, g))
        tl.store(
            gated + offset, finite_log2(log) - tl.where(log == float("-inf"), 0.0, size), mask=real
        )


@triton.jit(do_not_specialize=["ROWS"])
def nsa_bwd_preprocess(out, d_out, lse, d_lse, log, delta, ROWS, F: tl.constexpr):
    """One program: M rows of `delta = sum(out * d_out) - d_lse`, or without d_lse, and lse in units
    of log2."""
    row = tl.program_id(0).to(tl.int64) * F.BLOCK_M + tl.arange(0, F.BLOCK_M)
    real = row < ROWS
    o = load_rows(out, row * F.E, F.E, F.BLOCK_E, real).to(tl.float32)
    do = load_rows(d_out, row * F.E, F.E, F.BLOCK_E, real).to(tl.float32)
    value = tl.sum(o * do, 1)
    if d_lse is not None:
        value -= tl.load(d_lse + row, mask=real, other=0.0)
    tl.store(delta + row, value, mask=real)
    tl.store(log + row, finite_log2(tl.load(lse + row, mask=real, other=0.0)), mask=real)


def forward(sel: Tensor, combine: Combine) -> None:
    """Write the layer's output of the selected branch's, sel [B T H E]."""
    B, T, H, E = sel.shape
    launcher(nsa_combine_fwd, (cdiv(B * T * H, BLOCK_ROWS),))(
        sel, combine, B * T * H, H, T, Settings(E, launch.padded(E), BLOCK_ROWS)
    )


def backward(
    d_out: Tensor, outs: list[Tensor], lses: list[Tensor], gates: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """d_gates [B T H 3], and the gated `BackwardInputs` lse and delta of each branch [3 B T H]."""
    d_gates = gates.new_empty(gates.shape)
    delta, gated = (gates.new_empty(3, *gates.shape[:3], dtype=torch.float32) for _ in range(2))
    B, T, H, E = d_out.shape
    launcher(nsa_combine_bwd, (cdiv(B * T * H, BACKWARD_ROWS),))(
        tuple(outs), tuple(lses), Gates(gates, *gates.stride()), d_out, d_gates, delta, gated,
        B * T * H, H, T, Settings(E, launch.padded(E), BACKWARD_ROWS),
    )  # fmt: skip
    return d_gates, gated, delta


def backward_inputs(
    d_out: Tensor, out: Tensor, lse: Tensor, d_lse: Tensor | None = None
) -> BackwardInputs:
    """The backward inputs of a single branch; all tensors are contiguous."""
    E = out.shape[-1]
    log, delta = torch.empty_like(lse), torch.empty_like(lse)
    launcher(nsa_bwd_preprocess, (cdiv(delta.numel(), BLOCK_ROWS),))(
        out, d_out, lse, d_lse, log, delta, delta.numel(),
        F=Settings(E, launch.padded(E), BLOCK_ROWS),
    )  # fmt: skip
    return BackwardInputs(d_out, log, delta)
