"""The settings of `SparseAttention` that are no networks: each alone, and with the others."""

from __future__ import annotations

import inspect
from typing import Any

from .checks.scalars import check_elements
from .checks.tensors import (
    BACKENDS,
    BRANCH_KV,
    check_bools,
    check_choice,
    check_groups,
    check_int,
    check_ints,
    check_positive,
    check_selection,
)
from .ops.block_sizes import check_block_sizes


def check_settings(
    *,
    dim: Any,
    dim_head: Any,
    heads: Any,
    kv_heads: Any,
    sliding_window_size: Any,
    num_compressed_mem_kv: Any,
    causal: Any,
    norm: Any,
    use_diff_topk: Any,
    use_triton_kernel: Any,
    compress_block_size: Any,
    compress_block_sliding_stride: Any,
    branch_kv: Any,
    soft_cap: Any,
    attention_sinks: Any,
    block_sizes: Any,
    recompute: Any,
    backend: Any,
    **selection: Any,
) -> dict[str, Any]:
    """The settings by name, as plain values: integers of any integral type as `int`, what is None
    replaced by what it stands for.

    Raises:
        ValueError: a setting out of range, or two that do not go together.
    """
    dim, dim_head, heads = check_ints(1, dim=dim, dim_head=dim_head, heads=heads)
    kv_heads = heads if kv_heads is None else check_int("kv_heads", kv_heads, 1)
    check_groups(heads, kv_heads)
    w, m = check_ints(
        0, sliding_window_size=sliding_window_size, num_compressed_mem_kv=num_compressed_mem_kv
    )
    stride = compress_block_sliding_stride
    selection = check_selection(
        compress_block_size=compress_block_size,
        compress_block_sliding_stride=compress_block_size if stride is None else stride,
        **selection,
    )
    causal, norm, use_diff_topk, use_triton_kernel, attention_sinks, recompute = check_bools(
        causal=causal, norm=norm, use_diff_topk=use_diff_topk,
        use_triton_kernel=use_triton_kernel, attention_sinks=attention_sinks, recompute=recompute,
    )  # fmt: skip
    check_choice("branch_kv", branch_kv, BRANCH_KV)
    check_choice("backend", backend, BACKENDS)
    check_block_sizes(block_sizes)
    if use_triton_kernel and backend not in ("auto", "triton"):
        raise ValueError(
            f"use_triton_kernel=True asks for backend='triton', but backend={backend!r} was given"
        )
    check_elements(dim=dim, heads=heads, dim_head=dim_head)
    check_elements(kv_heads=kv_heads, num_compressed_mem_kv=m, dim_head=dim_head)
    l = selection["compress_block_size"]
    check_elements(kv_heads=kv_heads, compress_block_size=l, dim_head=dim_head)
    return dict(
        dim=dim,
        dim_head=dim_head,
        heads=heads,
        kv_heads=kv_heads,
        causal=causal,
        use_diff_topk=use_diff_topk,
        sliding_window_size=w,
        num_compressed_mem_kv=m,
        **selection,
        branch_kv=branch_kv,
        soft_cap=check_positive("soft_cap", soft_cap),
        block_sizes=block_sizes,
        recompute=recompute,
        backend="triton" if use_triton_kernel else backend,
    )


SELECTION = tuple(inspect.signature(check_selection).parameters)
NAMES = {*SELECTION, *inspect.signature(check_settings).parameters} - {"selection"}
