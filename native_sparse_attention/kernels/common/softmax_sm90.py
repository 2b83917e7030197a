"""The softmax of the backward kernels, in Gluon."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def probabilities(s, scale_log2, lse, delta, GATED: gl.constexpr):
    """Probabilities of logits `s`, with the sign of the gate, as in `primitives.softmax_grad`."""
    p = gl.exp2(s * scale_log2 - lse)
    if GATED:
        sign = delta.to(gl.int32, bitcast=True) << 31
        p = (p.to(gl.int32, bitcast=True) ^ sign).to(gl.float32, bitcast=True)
    return p
