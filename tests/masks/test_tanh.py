"""The approximate tanh of score mods: an operator, and one instruction of the GPU."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

import pytest
import torch
from torch.nn.attention import flex_attention as flex

from native_sparse_attention import masks
from native_sparse_attention.masks import tanh
from tests.helpers.budget import CUDA
from tests.masks.test_score_mods import draw

# tanh


def test_tanh_approx_is_an_operator():
    x = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    torch.library.opcheck(masks.tanh_approx, (x,))
    assert torch.equal(masks.tanh_approx(x), torch.tanh(x))
    assert torch.autograd.gradcheck(masks.tanh_approx, (x,))
    assert torch.autograd.gradgradcheck(masks.tanh_approx, (x,))


def test_tanh_approx_under_vmap():
    x = torch.randn(3, 4, 5)
    for nested in (torch.vmap(masks.tanh_approx), torch.vmap(torch.vmap(masks.tanh_approx))):
        assert torch.equal(nested(x), torch.tanh(x))
    across = torch.vmap(masks.tanh_approx, in_dims=1, out_dims=1)
    assert torch.equal(across(x), torch.tanh(x))


@pytest.mark.slow
def test_tanh_approx_in_a_mod_of_ones_own():
    """Compiled where nobody has made a `soft_cap`."""
    from torch._inductor.lowering import lowerings

    def capped(score, b, h, i, j):
        return 2 * masks.tanh_approx(score / 2)

    lowerings.pop(torch.ops.native_sparse_attention.tanh_approx.default, None)
    torch._dynamo.reset()
    q, k, v = (t.detach().float() for t in draw())
    out = torch.compile(flex.flex_attention)(q, k, v, score_mod=capped)
    expected = masks.dense_attention(q, k, v, score_mod=masks.soft_cap(2.0))
    torch.testing.assert_close(out, expected, atol=2e-3 if CUDA else 1e-5, rtol=1e-3)


def test_capped_attention_made_and_compiled_in_one_graph():
    """The factory is traced too: nothing of the registration stops it."""

    def capped(q, k, v):
        return flex.flex_attention(q, k, v, score_mod=masks.soft_cap(2.0, approximate=True))

    torch._dynamo.reset()
    q, k, v = (t.detach().float() for t in draw())
    out = torch.compile(capped, backend="aot_eager", fullgraph=True)(q, k, v)
    expected = masks.dense_attention(q, k, v, score_mod=masks.soft_cap(2.0))
    torch.testing.assert_close(out, expected)


@pytest.mark.parametrize(
    ("device", "dtype", "instruction"),
    [
        ("cuda", torch.float32, True),
        ("cuda", torch.bfloat16, True),
        ("cuda", torch.float64, False),
        ("cpu", torch.float32, False),
    ],
)
def test_how_inductor_takes_it(device, dtype, instruction):
    """One pointwise step of its own dtype, in float32 inside. Nothing is compiled."""
    from torch._inductor import ir
    from torch._inductor.graph import GraphLowering
    from torch._inductor.lowering import lowerings
    from torch._inductor.virtualized import V

    tanh.register_lowering()
    layout = ir.FixedLayout(torch.device(device), dtype, [4], [1])
    lower = lowerings[torch.ops.native_sparse_attention.tanh_approx.default]
    with V.set_graph_handler(GraphLowering(torch.fx.symbolic_trace(lambda x: x))):
        box = lower(ir.TensorBox.create(ir.InputBuffer(name="x", layout=layout)))
        told = box.data.data.inner_fn_str()
    assert box.get_dtype() == dtype
    assert ("ops.tanh(" in told) != instruction
    called = "ops.inline_asm_elementwise(" in told and tanh.ASM in told and "torch.float32" in told
    assert called == instruction


ASSEMBLE = """
import triton, triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

@triton.jit
def kernel(x, y, asm: tl.constexpr, constraints: tl.constexpr):
    i = tl.arange(0, 128)
    t = tl.inline_asm_elementwise(
        asm, constraints, [tl.load(x + i)], dtype=tl.float32, is_pure=True, pack=1
    )
    tl.store(y + i, t)

types = {"x": "*fp32", "y": "*fp32", "asm": "constexpr", "constraints": "constexpr"}
def assemble(asm):
    held = {"asm": asm, "constraints": CONSTRAINTS}
    source = ASTSource(kernel, types, constexprs=held)
    return triton.compile(source, target=GPUTarget("cuda", 80, 32))

compiled = assemble(ASM)
assert "tanh.approx.f32" in compiled.asm["ptx"] and compiled.asm["cubin"]
try:
    # without operands, as it is often written
    assemble("tanh.approx.f32 0,1;")
except Exception as error:
    assert "Arguments mismatch" in str(error), error
else:
    raise SystemExit("ptxas takes anything")
"""


def test_assembly_assembles(tmp_path):
    """ptxas takes the instruction, for a GPU that need not be there."""
    if importlib.util.find_spec("triton") is None:
        pytest.skip("needs triton")
    script = tmp_path / "assemble.py"
    script.write_text(
        f"ASM, CONSTRAINTS = {tanh.ASM!r}, {tanh.CONSTRAINTS!r}\n{ASSEMBLE}", encoding="utf-8"
    )
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    env["TRITON_CACHE_DIR"] = str(tmp_path / "cache")
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr
