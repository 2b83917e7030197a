"""Launches every kernel a few times at odd, small shapes, for a memory checker to watch:

    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --error-exitcode 1 python tests/sanitize.py

or `make sanitize`. Computes no reference; fails where a kernel was not launched.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from native_sparse_attention import (
    KVCache,
    PagedKVCache,
    SparseAttention,
    compressed_attention,
    kernels,
    native_sparse_attention,
    select_blocks,
    selected_attention,
    sliding_window_attention,
)
from native_sparse_attention.kernels import launch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LOW = (torch.bfloat16, torch.float16) if DEVICE == "cuda" else (torch.float32, torch.float32)


def all_kernels() -> Iterator[tuple[str, Any]]:
    """What has a grid: functions of a module of `kernels` that are named so."""
    for info in pkgutil.iter_modules(kernels.__path__):
        module = importlib.import_module(f"{kernels.__name__}.{info.name}")
        for name, value in vars(module).items():
            if name.endswith("_kernel") and value.fn.__module__ == module.__name__:
                yield f"{info.name}.{name}", value


def watch() -> tuple[set[str], set[str]]:
    """All kernels, and those launched from now on."""
    known, launched = dict(all_kernels()), set()
    for name, kernel in known.items():
        kernel.add_pre_run_hook(lambda *_, _name=name, **__: launched.add(_name))
    return set(known), launched


def draw(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(*shape, device=DEVICE).to(dtype).requires_grad_()


def run(call: Any, *tensors: Tensor, **kwargs: Any) -> None:
    out = call(*tensors, backend="triton", **kwargs)
    out.sum().backward()


def layer(
    dtype: torch.dtype, heads: tuple[int, int, int, int], T: int, S: int, **settings: Any
) -> None:
    """The whole layer, forward and backward, with memory slots."""
    settings = {
        "compress_block_size": 8,
        "compress_block_sliding_stride": 4,
        "selection_block_size": 8,
        "num_selected_blocks": 3,
        "sliding_window_size": 11,
        "num_initial_blocks": 1,
        "num_local_blocks": 2,
        "causal": True,
        **settings,
    }
    (H, K, D, E), d = heads, settings["compress_block_sliding_stride"]
    W = S // d if settings["causal"] else -(-S // d)
    shapes = [(2, T, H, D), (2, S, K, D), (2, S, K, E), (2, W, K, D), (2, W, K, E), (2, T, H, 3)]
    memory = {"mem_k": draw(K, 3, D, dtype=dtype), "mem_v": draw(K, 3, E, dtype=dtype)}
    tensors = [draw(*shape, dtype=dtype) for shape in shapes]
    run(native_sparse_attention, *tensors, **memory, **settings)


def packed(dtype: torch.dtype) -> None:
    """Documents in a row, some of them of no token or one; with a cap and sinks."""
    lengths = [3, 0, 1, 38, 17]
    total, bounds = sum(lengths), torch.tensor([0, *lengths]).cumsum(0)
    for importance, causal in (("probs", True), ("logits", False)):
        W = sum(n // 4 if causal else -(-n // 4) for n in lengths)
        shapes = [(total, 6, 24), (total, 2, 24), (total, 2, 16), (W, 2, 24), (W, 2, 16)]
        tensors = [draw(1, *shape, dtype=dtype) for shape in (*shapes, (total, 6, 3))]
        run(
            native_sparse_attention, *tensors, compress_block_size=8,
            compress_block_sliding_stride=4, selection_block_size=8, num_selected_blocks=2,
            sliding_window_size=9, num_initial_blocks=1, importance=importance, causal=causal,
            soft_cap=2.0, sinks=draw(3, 6, dtype=torch.float32), cu_seqlens=bounds,
        )  # fmt: skip


def ragged(dtype: torch.dtype) -> None:
    """The branches alone, over rows that start at different positions; lists and gates of a
    caller's."""
    B, T, S, H, K, D = 2, 5, 37, 6, 2, 24
    q, k, v = (draw(B, n, h, D, dtype=dtype) for n, h in ((T, H), (S, K), (S, K)))
    where = {"q_offset": torch.tensor([29, 3], device=DEVICE)}
    run(sliding_window_attention, q, k, v, sliding_window_size=7, **where)
    ck, cv = (t.detach()[:, :9] for t in (k, v))
    run(compressed_attention, q, ck, cv, compress_block_sliding_stride=4, **where)
    for ranks in (K, H):
        lists = torch.randint(-1, 7, (B, T, ranks, 3), device=DEVICE, dtype=torch.int32)
        gates = torch.rand(lists.shape, device=DEVICE).to(dtype).requires_grad_()
        for chosen in (None, gates):
            run(selected_attention, q, k, v, lists, gates=chosen, selection_block_size=6, **where)
    for importance in ("logits", "probs"):
        settings = {
            "compress_block_size": 4,
            "compress_block_sliding_stride": 4,
            "selection_block_size": 4,
            "num_selected_blocks": 5,
        }
        select_blocks(q, ck, importance=importance, backend="triton", **settings, **where)


def alike(dtype: torch.dtype) -> None:
    """Neighbours that chose the same blocks, united, query by query and block by block."""
    with launch.using({"unite": launch.Unite(4, 1.1, least=0)}):
        for heads in (12, 1):
            q, k, v = (draw(2, 19, h, 24, dtype=dtype) for h in (heads, 1, 1))
            lists = torch.tensor([2, 0, 1], device=DEVICE, dtype=torch.int32)
            lists = lists.expand(2, 19, 1, 3).clone()
            lists[:, 8:12] = torch.randint(-1, 4, (2, 4, 1, 3), device=DEVICE, dtype=torch.int32)
            run(selected_attention, q, k, v, lists, selection_block_size=5)


def steps(cache: KVCache, **settings: Any) -> None:
    """Steps of decoding, of one token and of several, some of them not real, to a window's end."""
    module = SparseAttention(
        24, 16, 4, 5, 8, 8, 2, kv_heads=2, causal=True, compress_block_sliding_stride=4,
        num_compressed_mem_kv=1, backend="triton", **settings,
    ).to(DEVICE)  # fmt: skip
    with torch.no_grad():
        for counts in ([13, 2], [3, 1], [1, 1]):
            inp = draw(2, max(counts), 24, dtype=torch.float32).detach()
            module(inp, cache=cache, lengths=counts)


def main() -> None:
    known, launched = watch()
    first, second = LOW
    layer(first, (12, 1, 24, 40), 21, 53, importance="probs")
    layer(second, (3, 1, 80, 16), 19, 19, causal=False, interpolated_importance_score=True)
    layer(first, (4, 2, 16, 16), 33, 33, selection_stride=4, recompute=True)
    layer(torch.float32, (4, 1, 16, 16), 1, 1, query_heads_share_selected_kv=False)
    ragged(second)
    packed(first)
    alike(first)
    gates = {"use_diff_topk": True, "num_selected_blocks": 2}
    layer(first, (6, 2, 16, 16), 23, 29, **gates)
    layer(second, (3, 1, 24, 16), 23, 23, importance="probs", selection_stride=2, **gates)
    steps(KVCache(24, 2), selection_stride=4)
    steps(PagedKVCache(8, 6, 2, 24), importance="probs", branch_kv="independent")
    # several spans of tokens, and several items of a block
    usual, launch.FEW_TOKENS, launch.ITEM_ROWS = (launch.FEW_TOKENS, launch.ITEM_ROWS), 16, 16
    layer(first, (2, 2, 16, 16), 37, 41)
    launch.FEW_TOKENS, launch.ITEM_ROWS = usual
    if DEVICE == "cuda":
        wide = {"compress_block_size": 32, "compress_block_sliding_stride": 16}
        # blocks of 64 keys are read by the tensor memory accelerator, where there is one
        layer(first, (16, 1, 128, 128), 131, 211, selection_block_size=64, **wide)
        layer(first, (64, 1, 192, 128), 67, 67, importance="probs")
        layer(torch.float32, (5, 1, 80, 40), 65, 65, selection_block_size=32)
        layer(first, (16, 1, 128, 128), 131, 131, importance="probs", **gates)
        torch.cuda.synchronize()
    missing = known - launched
    if missing:
        raise SystemExit(f"never launched: {', '.join(sorted(missing))}")
    print(f"launched {len(launched)} kernels: {', '.join(sorted(launched))}")


if __name__ == "__main__":
    main()
