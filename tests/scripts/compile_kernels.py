"""Compiles the kernels for a GPU that is not there: `python tests/scripts/compile_kernels.py 90`.

Stands in for the driver, so that a launch compiles and goes no further. What the interpreter lets
pass and a compiler does not (types that change in a loop, shapes that are no power of two) shows
here. Prints what each kernel takes: registers, and bytes of stack, which are spilt registers.
"""

from __future__ import annotations

import itertools
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from native_sparse_attention.config import AttentionConfig
from native_sparse_attention.kernels import compress_mean, rotary
from native_sparse_attention.kernels.common import launch
from native_sparse_attention.kernels.decode import persistent, read_all
from native_sparse_attention.kernels.selected import query_major
from native_sparse_attention.kernels.selected.inputs import Inputs
from native_sparse_attention.ops.call import Call as LayerCall
from native_sparse_attention.ops.call import DecodeInputs
from native_sparse_attention.ops.triton import backend as triton_backend
from native_sparse_attention.varlen import Documents

CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"


# what a launch of few tokens does not take by itself
ON_A_HOPPER = {
    "flash_sm90": True,
    "union_sm90": True,
    "union": launch.UnionRule(4, 1.6, least=0),
}


class Driver:
    """What a launch asks of a driver before it launches."""

    def __init__(self, capability: int):
        self.target = GPUTarget("cuda", capability, 32)

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def resources(cubin: bytes) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [CUOBJDUMP, "--dump-resource-usage", file.name]
        shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return " ".join(re.findall(r"(?:REG|STACK):\d+", shown))


def compile_only(capability: int) -> None:
    run, seen = JITFunction.run, set()
    rows = launch.ARCHITECTURES.get(divmod(capability, 10), launch.ELSEWHERE)

    def compiled(self, *args, grid, warmup, **kwargs):
        kernel = run(self, *args, grid=grid, warmup=True, **kwargs)
        if kernel.hash not in seen:
            seen.add(kernel.hash)
            name, shared = f"{self.fn.__module__}.{self.fn.__name__}", kernel.metadata.shared
            print(name, resources(kernel.asm["cubin"]), f"{shared // 1024} KB")
            assert shared <= rows.shared_memory, f"{name} takes {shared} bytes"
        return kernel

    JITFunction.run = compiled
    driver.set_active(Driver(capability))
    if capability < 90:
        launch.supports_tma = lambda *_: False
    elif launch.triton_is_known():
        launch.supports_gluon = lambda *_: True
        launch.multiprocessors = lambda *_: 132
    launch.architecture = lambda: rows


def layer(dtype, heads=(4, 2, 64, 64), S=200, causal=True, **settings):
    """Forward and backward of the layer."""
    H, K, D, E = heads
    d = settings.get("compress_block_sliding_stride", 4)
    shapes = [(1, S, H, D), (1, S, K, D), (1, S, K, E), (1, S // d, K, D), (1, S // d, K, E)]
    tensors = [torch.randn(s).to(dtype).requires_grad_() for s in (*shapes, (1, S, H, 3))]
    slots = settings.pop("slots", 1)
    if settings.pop("sinks", False):
        settings["sinks"] = torch.zeros(3, H, requires_grad=True)
    if settings.pop("packed", False):
        settings["documents"] = Documents(*torch.zeros(2, 1, S, dtype=torch.int32))
    memory = [
        torch.randn(K, slots, width).to(dtype).requires_grad_() if slots else None
        for width in (D, E)
    ]
    given = {name: settings.pop(name) for name in LayerCall._fields if name in settings}
    call = LayerCall(*tensors, mem_k=memory[0], mem_v=memory[1], q_offset=0)._replace(**given)
    settings = {
        "compress_block_size": 8,
        "compress_block_sliding_stride": d,
        "selection_block_size": 32,
        "num_selected_blocks": 2,
        "sliding_window_size": 70,
        "num_initial_blocks": 1,
        "num_local_blocks": 2,
        "causal": causal,
        **settings,
    }
    out, _ = triton_backend.native_sparse_attention(call, AttentionConfig(**settings))
    out.sum().backward()


def branches(dtype, heads=(4, 2, 64, 64), S=200, sizes=(16, 128), num_local=0, gated=False):
    """Forward and backward of the selected branch alone, with gates of its own."""
    H, K, D, E = heads
    q, k, v = (torch.randn(1, S, *s).to(dtype).requires_grad_() for s in ((H, D), (K, D), (K, E)))
    lists = torch.zeros(1, S, K, 2, dtype=torch.int32)
    gates = torch.ones(lists.shape).to(dtype).requires_grad_() if gated else None
    for s in sizes:
        config = AttentionConfig.unchecked(
            branches=("selected",), selection_block_size=s, num_selected_blocks=0,
            num_initial_blocks=1, num_local_blocks=num_local, causal=True,
        )  # fmt: skip
        call = LayerCall(q, k, v, block_indices=lists, gates=gates)
        triton_backend.attend_branch(call, config).sum().backward()


def gated_rows(dtype, G, stride, D=128, S=250):
    """The query-major forward with float32 gates of slots; the last block is partial."""
    q, k = torch.zeros(1, S, G, D).to(dtype), torch.zeros(1, S, 1, D).to(dtype)
    block_indices = torch.zeros(1, S, 1, 13, dtype=torch.int32)
    gates = torch.ones(block_indices.shape)
    selection = launch.Selection(block_indices, 64, 1, 2, True, gates=gates, stride=stride)
    query_major.forward(Inputs(q, k, k, selection, 0.1))


def step(dtype, heads, T=1, page=0, B=16, counted=False, one_softmax=False, **settings):
    """A decode step over a contiguous or paged cache; by `read_all` where it supports the call, and
    by the persistent kernel."""
    (H, K, D, E), N = heads, 1024
    config = AttentionConfig(**{
        "compress_block_size": 32, "selection_block_size": 64, "num_selected_blocks": 13,
        "sliding_window_size": 511, "num_initial_blocks": 1, "num_local_blocks": 2, "scale": 0.1,
        **settings,
    })  # fmt: skip
    pages, n = (B * N // page, page) if page else (B, N)
    shapes = [(B, T, H, D), (pages, n, K, D), (pages, n, K, E)]
    shapes += [(pages, n // config.d, K, D), (pages, n // config.d, K, E)]
    tensors = [torch.randn(shape).to(dtype) for shape in shapes]
    gates = None if one_softmax else torch.randn(B, T, H, 3).to(dtype)
    ring = torch.zeros(B, K, 20, config.num_selected_blocks, dtype=torch.int32)
    counters = torch.zeros(B, K, 8, dtype=torch.int32)
    lengths = torch.zeros(B, dtype=torch.int64 if counted else torch.int32)
    table = torch.zeros(B, N // page, dtype=torch.int32) if page else None
    q, k, v, ck, cv = tensors
    call = DecodeInputs(
        q, k, v, lengths, ck, cv, gates, lengths if counted else None, table, counters=counters,
        ranking=ring,
    )  # fmt: skip
    blocks = read_all.MAX_BLOCKS
    for read_all.MAX_BLOCKS in (0, blocks):
        read_all.plan.cache_clear()
        persistent.decode(call, config)


def rotate(dtype, heads, tokens=64, starts=None):
    """Queries and keys of a projection."""
    H, K, D = heads
    q, k = torch.zeros(2, tokens, (H + 2 * K) * D).to(dtype).split([H * D, 2 * K * D], -1)
    pair = [t.unflatten(-1, (-1, D)).transpose(1, 2) for t in (q, k[..., : K * D])]
    rotary.rotate(pair, torch.ones(D // 2), starts, None, 0, 1.0)


def means(dtype, heads, l=32, d=16, tokens=256):
    """Means of windows of a projection's keys and values."""
    _, K, D = heads
    kv = torch.zeros(2, tokens, 3 * K * D).to(dtype).split(K * D, -1)[1:]
    k, v = (t.unflatten(-1, (-1, D)).transpose(1, 2) for t in kv)
    positions = [torch.zeros(K, l, D)] * 2
    ck, cv = compress_mean.forward([k, v], positions, l, d, tokens // d)
    compress_mean.backward(ck, cv, *positions, l, d, tokens)


def rank(dtype, heads, importance="probs", **settings):
    """The selection."""
    H, K, D = heads
    settings = {
        "compress_block_size": 32, "compress_block_sliding_stride": 16, "selection_block_size": 64,
        "num_selected_blocks": 13, "num_initial_blocks": 1, "num_local_blocks": 2,
        "selection_stride": 1, "causal": True, **settings,
    }  # fmt: skip
    W = 320 // settings["compress_block_sliding_stride"]
    q, ck = torch.zeros(1, 320, H, D).to(dtype), torch.zeros(1, W, K, D).to(dtype)
    config = AttentionConfig.unchecked(**settings, importance=importance)
    triton_backend.select_blocks(LayerCall(q, ck=ck, seq_len=320), config)


if __name__ == "__main__":
    compile_only(int(sys.argv[1]))
    some = set(sys.argv[2:])
    if "small" in some:  # two halves, for two processes
        some |= {"small-1", "small-2"}
    if "small-1" in some:
        layer(torch.bfloat16, packed=True, soft_cap=2.0, sinks=True)
        if sys.argv[1] == "90":
            with launch.using(ON_A_HOPPER):
                layer(
                    torch.bfloat16, (16, 1, 128, 128), S=192, selection_block_size=64, slots=0,
                    importance="probs",
                )  # fmt: skip
                layer(
                    torch.bfloat16, (16, 1, 128, 128), S=192, selection_block_size=64, slots=0,
                    selection_stride=4,
                )  # fmt: skip
    if "small-2" in some and sys.argv[1] == "90":
        branches(torch.bfloat16, (4, 1, 128, 128), S=192, sizes=(64,), num_local=1)
        rank(torch.bfloat16, (16, 1, 128))
    if not some or "small-2" in some:
        rank(torch.float32, (2, 1, 256), importance="logits")
        rotate(torch.bfloat16, (16, 1, 128))
        step(torch.bfloat16, (16, 1, 128, 128), selection_stride=4, page=128, counted=True)
        step(torch.bfloat16, (16, 1, 128, 128), B=1)
    if not some or "decode" in some:
        step(torch.bfloat16, (16, 1, 128, 128), importance="probs", T=16, soft_cap=2.0)
        step(torch.bfloat16, (3, 1, 192, 128), T=4, interpolated_importance_score=True)
        step(torch.bfloat16, (16, 1, 128, 128), importance="probs", T=2, B=1, counted=True)
        step(torch.float32, (4, 4, 80, 40), num_selected_blocks=20)
        step(torch.float32, (4, 4, 80, 40), num_selected_blocks=20, B=1)
        step(torch.bfloat16, (64, 4, 128, 128), B=1, counted=True)
        step(torch.bfloat16, (64, 4, 128, 128), B=8, page=256, interpolated_importance_score=True)
        step(torch.bfloat16, (64, 4, 128, 128), importance="max")
        step(
            torch.bfloat16, (64, 4, 128, 128), one_softmax=True, num_selected_blocks=8,
            num_local_blocks=8,
        )  # fmt: skip
        for page, dtype in ((0, torch.bfloat16), (256, torch.bfloat16), (0, torch.float32)):
            step(
                dtype, (64, 4, 128, 128), page=page, one_softmax=True, importance="max",
                compress_block_size=1, compress_block_sliding_stride=1, num_selected_blocks=8,
                num_local_blocks=8,
            )  # fmt: skip
        step(torch.float32, (3, 1, 64, 40), B=1, T=2, soft_cap=2.0)
        step(torch.bfloat16, (16, 1, 128, 128), B=1, page=256, importance="probs")
        for H, T, s in itertools.product((16, 32, 64), (1, 4), (16, 64, 128)):
            needed = launch.decode_bytes(H, 256, 4, T, s)
            if needed <= launch.architecture().shared_memory:
                step(torch.float32, (H, 1, 256, 256), T=T, selection_block_size=s)
    if not some or "rotary" in some:
        rotate(torch.bfloat16, (64, 4, 128), tokens=1, starts=torch.zeros(2, dtype=torch.int32))
        rotate(torch.float16, (3, 1, 80))
        rotate(torch.float32, (4, 4, 256))
    if not some or "means" in some:
        means(torch.bfloat16, (64, 4, 128))
        means(torch.float32, (3, 1, 80), 5, 1)
    if not some or "layer" in some:
        layer(torch.bfloat16)
        layer(torch.bfloat16, (16, 1, 128, 128), importance="probs", recompute=True)
        layer(torch.bfloat16, (16, 1, 128, 128), selection_stride=4)
        layer(torch.bfloat16, (3, 1, 192, 128), causal=False, query_heads_share_selected_kv=False)
        layer(torch.float32, (5, 1, 80, 40), importance="probs", slots=0)
        layer(torch.bfloat16, (16, 1, 128, 128), importance="probs", packed=True)
        layer(torch.bfloat16, (4, 1, 64, 64), causal=False, packed=True)
        layer(torch.bfloat16, (16, 1, 128, 128), importance="probs", soft_cap=2.0, sinks=True)
    if not some or "union" in some:
        for dtype, width in ((torch.bfloat16, 128), (torch.float16, 64)):
            with launch.using(ON_A_HOPPER | {"flash_sm90": None}):
                layer(dtype, (16, 1, width, width), S=192, selection_block_size=64)
                for stride in (1, 4):  # dk and dv with dq, and without
                    layer(
                        dtype, (4, 1, width, width), S=192, selection_block_size=64,
                        selection_stride=stride,
                    )  # fmt: skip
    if not some or "flash" in some:
        with launch.using({"flash_sm90": True}):
            for heads in (1, 2, 4, 8, 16, 32, 64):
                for size in (64, 129):  # narrower than the local blocks, and wider
                    layer(
                        torch.bfloat16, (heads, 1, 128, 128), slots=0, selection_block_size=64,
                        sliding_window_size=size,
                    )  # fmt: skip
            layer(torch.float16, (16, 1, 128, 128), slots=1, sliding_window_size=129)
            for heads in (4, 16):  # local blocks and a prefix of initial ones
                branches(torch.bfloat16, (heads, 1, 128, 128), sizes=(32, 64), num_local=2)
    if not some or "ranking" in some:
        for heads in (4, 8, 16, 32, 64):
            rank(torch.bfloat16, (heads, 1, 128))
        rank(torch.float16, (16, 1, 64), num_selected_blocks=16, selection_stride=4)
        rank(torch.bfloat16, (8, 1, 128), num_selected_blocks=16, causal=False)
        rank(torch.bfloat16, (16, 1, 128), selection_block_size=32)
        for dtype in (torch.bfloat16, torch.float32):
            rank(
                dtype, (16, 1, 128), importance="max", compress_block_size=1,
                compress_block_sliding_stride=1,
            )  # fmt: skip
    if not some or "selected" in some:
        branches(torch.bfloat16, gated=True)
        branches(torch.float16, (16, 1, 64, 64), gated=True)
        for G, stride in ((16, 1), (16, 4), (64, 1)):
            gated_rows(torch.bfloat16, G, stride)
        for width in (128, 256):  # as many heads as this GPU holds
            most = max(
                group
                for group in (16, 32, 64)
                if launch.backward_bytes(group, width) <= launch.architecture().shared_memory
            )
            heads = (most, 1, width, width)
            branches(torch.float32, heads, sizes=(64, 128), num_local=1, gated=True)
            branches(torch.float32, heads, sizes=(64, 128), num_local=1)
        with launch.using({"union": launch.UnionRule(4, 1.6, least=0)}):
            for heads in ((16, 1, 128, 128), (12, 1, 192, 128)):
                branches(torch.bfloat16, heads)
