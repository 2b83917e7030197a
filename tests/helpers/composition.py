"""The layer as one operator against its three branches, put together."""

import functools

import torch

from native_sparse_attention import (
    compressed_attention,
    native_sparse_attention,
    selected_attention,
    sliding_window_attention,
)
from native_sparse_attention.ops.reference import combine_branches
from tests.helpers.budget import assert_right


def composed(
    q, k, v, ck, cv, branch_gates, cq=None, mem_k=None, mem_v=None, window_k=None, window_v=None,
    *, backend, sizes, lists, causal=True, **forced,
):  # fmt: skip
    """The layer by its branches, the selection given."""
    cq = q if cq is None else cq
    window = (k, v) if window_k is None else (window_k, window_v)
    place = {"causal": causal, "backend": backend}
    d, s, w = (
        sizes[name]
        for name in (
            "compress_block_sliding_stride",
            "selection_block_size",
            "sliding_window_size",
        )
    )
    outs = (
        compressed_attention(
            cq, ck, cv, mem_k=mem_k, mem_v=mem_v, seq_len=k.shape[1],
            compress_block_sliding_stride=d, **place,
        ),
        selected_attention(q, k, v, lists, selection_block_size=s, **forced, **place),
        sliding_window_attention(q, *window, sliding_window_size=w, **place),
    )  # fmt: skip
    return combine_branches(outs, branch_gates)


def assert_layer_right(tensors, sizes, causal=True, forced=None, **settings):
    """One operator within the budget of the composition, under the selection that it made."""
    forced = forced or {}
    call = functools.partial(
        native_sparse_attention, backend="triton", causal=causal, **sizes, **forced, **settings
    )
    with torch.no_grad():
        _, lists = call(**tensors, return_indices=True)

    def op(*, backend, **leaves):
        if backend == "triton":
            return call(**leaves)
        return composed(
            **leaves, backend=backend, sizes=sizes, lists=lists, causal=causal, **forced
        )

    assert_right(op, tensors, tensors["q"].dtype)
