"""Compiles the kernels for a GPU that is not there: `python tests/scripts/compile_kernels.py 90`.

Stands in for the driver, so that a launch compiles and goes no further. What the interpreter lets
pass and a compiler does not (types that change in a loop, shapes that are no power of two) shows
here. Prints what each kernel takes: registers, and bytes of stack, which are spilt registers.
"""

import itertools
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

os.environ["CUDA_VISIBLE_DEVICES"] = ""  # a GPU of this machine takes no part

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

# also as a script, whose folder alone is on the path
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from native_sparse_attention import select_blocks
from native_sparse_attention.kernels import rotary
from native_sparse_attention.kernels.common import launch
from native_sparse_attention.kernels.decode import read_all
from native_sparse_attention.ops.decode import decode_attention
from native_sparse_attention.ops.triton import backend as triton_backend
from tests.helpers.calls import draw
from tests.helpers.sizes import sizes
from tests.kernels.decode import test_decode

CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"


BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
WIDE = (16, 1, 128, 128)
UNIONS = {"union": launch.UnionRule(4, 1.6, min_groups=0)}
# what a launch of few tokens does not take by itself
ON_A_HOPPER = {"flash_sm90": True, "union_sm90": True, **UNIONS}
SIZES = sizes(8, 4, 32, n=2, w=70, num_initial_blocks=1, num_local_blocks=2)
# windows of one token
TOKENS = dict(importance="max", compress_block_size=1, compress_block_sliding_stride=1)


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
        told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return " ".join(re.findall(r"(?:REG|STACK):\d+", told))


def stand_in(capability, launched):
    """For a GPU of that capability, whose launches do what `launched` does. Its limits."""
    JITFunction.run = launched
    driver.set_active(Driver(capability))
    rows = launch.ARCHITECTURES.get(divmod(capability, 10), launch.OTHER_GPUS)
    if capability < 90:
        launch.supports_tma = lambda *_: False
    elif launch.triton_is_known():
        launch.supports_gluon = lambda *_: True
        launch.multiprocessors = lambda *_: 132
    launch.architecture = lambda: rows
    return rows


def compile_only(capability: int) -> None:
    run, seen = JITFunction.run, set()

    def compiled(self, *args, grid, warmup, **kwargs):
        kernel = run(self, *args, grid=grid, warmup=True, **kwargs)
        if kernel.hash not in seen:
            seen.add(kernel.hash)
            name, shared = f"{self.fn.__module__}.{self.fn.__name__}", kernel.metadata.shared
            print(name, resources(kernel.asm["cubin"]), f"{shared // 1024} KB")
            assert shared <= rows.shared_memory, f"{name} takes {shared} bytes"
        return kernel

    rows = stand_in(capability, compiled)
    triton_backend.why_not = lambda *_, **__: []


def layer(dtype, heads=(4, 2, 64, 64), T=200, branch="layer", **settings):
    """Forward and backward of a layer, or of a branch alone."""
    sizes = SIZES | dict(memory=1) if branch == "layer" else {}
    call = draw(branch, dtype, place=(T, T), heads=heads, batch=1, **{**sizes, **settings})
    out = call.leaves()("triton")
    (out[0] if isinstance(out, tuple) else out).sum().backward()


def selected(dtype, heads=(4, 2, 64, 64), T=200, sizes=(16, 128), num_local=0, gated=False):
    """Forward and backward of the selected branch alone."""
    for s in sizes:
        layer(
            dtype, heads, T, "selected", n=2, gated=gated, selection_block_size=s,
            num_initial_blocks=1, num_local_blocks=num_local,
        )  # fmt: skip


def step(dtype, heads, T=1, page=None, B=16, counted=False, index_dim=0, **settings):
    """A decode step over a contiguous or paged cache; by `read_all` where it supports the call, and
    by the persistent kernel. With `index_dim` by index queries, one for each KV head."""
    settings = sizes(32, 16, 64, n=13, w=511, num_initial_blocks=1, num_local_blocks=2) | settings
    integers = torch.int64 if counted else torch.int32
    tensors, settings = test_decode.problem(
        dtype, T, heads, 1024, [0] * B, memory=0, page=page, integers=integers, scale=0.1,
        index=(heads[1], index_dim) if index_dim else None, **settings,
    )  # fmt: skip
    counts, blocks = settings["lengths"] if counted else None, read_all.MAX_BLOCKS
    for read_all.MAX_BLOCKS in (0, blocks):
        read_all.plan.cache_clear()
        decode_attention(
            **tensors, **settings, counts=counts, backend="triton",
            ranking=test_decode.ring(settings, heads[:2], T),
        )  # fmt: skip


def rotate(dtype, heads, tokens=64, starts=None):
    """Queries and keys of a projection."""
    H, K, D = heads
    q, k = torch.zeros(2, tokens, (H + 2 * K) * D).to(dtype).split([H * D, 2 * K * D], -1)
    pair = [t.unflatten(-1, (-1, D)).transpose(1, 2) for t in (q, k[..., : K * D])]
    rotary.rotate(pair, torch.ones(D // 2), starts, None, 0, 1.0)


def rank(dtype, heads, **settings):
    """The selection."""
    H, K, D = heads
    usual = sizes(32, 16, 64, n=13, num_initial_blocks=1, num_local_blocks=2, importance="probs")
    settings = usual | settings
    W = 1280 // settings["compress_block_sliding_stride"]
    q, ck = torch.zeros(1, 1280, H, D).to(dtype), torch.zeros(1, W, K, D).to(dtype)
    if "num_selected_groups" in settings:
        settings |= dict(k=torch.zeros(1, 1280, K, D).to(dtype), num_local_blocks=4)
    select_blocks(q, ck, seq_len=1280, backend="triton", **settings)


def small_1(capability):
    layer(BF16, lengths=[150, 50], soft_cap=2.0, sinks=True)
    if capability == 90:
        with launch.using(ON_A_HOPPER):
            layer(BF16, WIDE, 192, "selected", n=2, selection_block_size=64)


def small_2(capability):
    if capability == 90:
        with launch.using(ON_A_HOPPER):
            for settings in ({"importance": "probs"}, {"selection_stride": 4}):
                layer(BF16, WIDE, 192, selection_block_size=64, memory=0, **settings)
        selected(BF16, (4, 1, 128, 128), 192, sizes=(64,), num_local=1)
        rank(BF16, (16, 1, 128))
    rank(FP32, (2, 1, 256), importance="logits")
    rotate(BF16, (16, 1, 128))
    step(BF16, WIDE, selection_stride=4, page=128, counted=True)
    step(BF16, WIDE, B=1)


def decode(capability):
    many = (64, 4, 128, 128)
    step(BF16, WIDE, importance="probs", T=16, soft_cap=2.0)
    step(BF16, (3, 1, 192, 128), T=4, interpolated_importance_score=True)
    step(FP32, (4, 4, 80, 40), num_selected_blocks=20)
    step(BF16, many, B=8, page=256, importance="probs", counted=True)
    one = dict(branches=("selected",), num_selected_blocks=8, num_local_blocks=8)
    step(BF16, many, **one)
    for width in (16, 64, 256):
        step(BF16, many, page=256, index_dim=width, T=width // 16, **one)
    step(FP32, many, index_dim=32, **one | TOKENS)
    stages = one | sizes(16, 16, 64, num_selected_groups=16)
    for importance in ("max", "head_max"):
        step(BF16, many, page=256, counted=True, importance=importance, **stages)
    step(FP32, many, importance="logits", query_heads_share_selected_kv=False, **stages)
    for dtype in (BF16, FP32):
        for ranking in ({}, *(dict(importance="head_max", ranking_bits=b) for b in (16, 8, 4))):
            step(dtype, many, page=256, **one | TOKENS | ranking)
    for H, T, s in itertools.product((16, 32, 64), (1, 4), (16, 64, 128)):
        if launch.decode_bytes(H, 256, 4, T, s) <= launch.architecture().shared_memory:
            step(FP32, (H, 1, 256, 256), T=T, selection_block_size=s)


def unions(capability):
    for dtype, width in ((BF16, 128), (FP16, 64)):
        with launch.using(ON_A_HOPPER | {"flash_sm90": None}):
            # dk and dv with dq, and without
            for heads, stride in ((16, 1), (4, 1), (4, 4)):
                heads = (heads, 1, width, width)
                layer(dtype, heads, 192, selection_block_size=64, selection_stride=stride)


def flash(capability):
    with launch.using({"flash_sm90": True}):
        # windows narrower than the local blocks, and wider
        for heads, w in itertools.product((1, 2, 4, 8, 16, 32, 64), (64, 129)):
            heads = (heads, 1, 128, 128)
            layer(BF16, heads, memory=0, selection_block_size=64, sliding_window_size=w)
        layer(FP16, WIDE, sliding_window_size=129)
        for heads in (4, 16):  # local blocks and a prefix of initial ones
            selected(BF16, (heads, 1, 128, 128), sizes=(32, 64), num_local=2)
        # at width 64
        for dtype, heads in itertools.product((BF16, FP16), ((4, 1, 64, 64), (16, 1, 64, 64))):
            layer(dtype, heads, memory=0, selection_block_size=64, sliding_window_size=129)
            layer(dtype, heads, selection_block_size=64, sliding_window_size=64)
            selected(dtype, heads, sizes=(64,), num_local=2)


def largest(capability):
    """Blocks of 32 to 128 keys in tiles of 128; portable on other GPUs."""
    with launch.using({"largest_sm90": True}):
        for s, n, stride in ((32, 16, 1), (64, 32, 4), (128, 13, 1)):
            for heads in ((16, 4, 128), (8, 2, 64), (4, 4, 32)):
                settings = dict(selection_block_size=s, num_selected_blocks=n, **TOKENS)
                windows = sizes(16, 16, s, num_selected_groups=n)
                bits = [dict(selection_stride=stride, ranking_bits=bits) for bits in (16, 8, 4)]
                for importance, form in itertools.product(("max", "head_max"), (*bits, windows)):
                    rank(BF16, heads, **settings | form | dict(importance=importance))


def ranking(capability):
    for heads in (4, 8, 16, 32, 64):
        rank(BF16, (heads, 1, 128))
    rank(FP16, (16, 1, 64), num_selected_blocks=16, selection_stride=4)
    rank(BF16, (8, 1, 128), num_selected_blocks=16, causal=False)
    rank(BF16, (16, 1, 128), selection_block_size=32)
    windows = dict(compress_block_size=16, compress_block_sliding_stride=16, num_selected_groups=5)
    for dtype in (BF16, FP32):
        for bits in (16, 8, 4):
            rank(dtype, (16, 1, 128), ranking_bits=bits, **TOKENS)
        with launch.using({"largest_sm90": False}):
            rank(dtype, (16, 1, 128), **TOKENS | windows)
            rank(dtype, (12, 1, 128), **TOKENS | windows | dict(importance="head_max"))


def selections(capability):
    selected(BF16, gated=True)
    selected(FP16, (16, 1, 64, 64), gated=True)
    for heads, stride in ((16, 1), (16, 4), (64, 1)):  # the last block is partial
        heads = (heads, 1, 128, 128)
        layer(BF16, heads, 250, use_diff_topk=True, num_selected_blocks=13, selection_stride=stride)
    for width in (128, 256):  # as many heads as this GPU holds
        most = launch.architecture().shared_memory
        groups = (G for G in (64, 32, 16) if launch.backward_bytes(G, width) <= most)
        heads = (next(groups), 1, width, width)
        for gated in (False, True):
            selected(FP32, heads, sizes=(64, 128), num_local=1, gated=gated)
    with launch.using(UNIONS):
        for heads in (WIDE, (12, 1, 192, 128)):
            selected(BF16, heads)


PARTS = (small_1, small_2, decode, unions, flash, largest, ranking, selections)


if __name__ == "__main__":
    capability, *names = sys.argv[1:]
    compile_only(int(capability))
    for part in PARTS:
        name = part.__name__.replace("_", "-")
        if not names or name in names:
            part(int(capability))
