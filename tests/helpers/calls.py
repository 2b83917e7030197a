"""Calls of the operations on random tensors: the rows of the table, which the laws draw too."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

import native_sparse_attention as nsa
from native_sparse_attention import blocks
from native_sparse_attention.ops.reference import combine_branches
from tests.helpers.budget import CUDA, DEVICE
from tests.helpers.sizes import sizes

# a tile of queries or keys, and the usual call: lengths, heads and sizes
BLOCK = 64 if CUDA else 16
PLACE = (131, 256) if CUDA else (19, 29)
HEADS = (16, 2, 128, 128) if CUDA else (4, 2, 16, 16)
L, D, S, W = (32, 16, 64, 100) if CUDA else (8, 4, 8, 9)
RANKING = sizes(L, D, S, n=2)
# some with no tokens, with one, and with more than a tile
DOCUMENTS = [37, 3, 0, 1, 150, 25] if CUDA else [13, 0, 1, 18]

BRANCHES = ("compressed", "selected", "window")
LAYERS = ("layer", "one softmax")
OPERATIONS = {
    "compressed": nsa.compressed_attention,
    "selected": nsa.selected_attention,
    "window": nsa.sliding_window_attention,
    "layer": nsa.native_sparse_attention,
    "one softmax": nsa.native_sparse_attention,
}
SETTINGS: dict[str, dict[str, Any]] = {
    "compressed": dict(compress_block_sliding_stride=D, return_lse=True),
    "selected": dict(selection_block_size=S, return_lse=True),
    "window": dict(sliding_window_size=W, return_lse=True),
    "layer": dict(RANKING, sliding_window_size=W),
    "one softmax": dict(RANKING, sliding_window_size=0, branches=("selected",)),
}
READ = {
    "compressed": ("q", "ck", "cv", "mem_k", "mem_v"),
    "selected": ("q", "k", "v"),
    "window": ("q", "k", "v"),
    "layer": ("q", "k", "v", "ck", "cv", "mem_k", "mem_v", "branch_gates"),
    "one softmax": ("q", "k", "v", "ck"),
}
SINKS = {"layer": (3,), "one softmax": (1,)}


class Call(NamedTuple):
    """An operation, its tensors that have gradients, and its other arguments."""

    op: Callable[..., Any]
    tensors: dict[str, Tensor]
    settings: dict[str, Any]

    def __call__(self, backend: str, **changes: Any) -> Any:
        return self.op(**self.tensors, **self.settings | changes, backend=backend)

    def leaves(self) -> Call:
        tensors = {n: t.detach().clone().requires_grad_() for n, t in self.tensors.items()}
        return self._replace(tensors=tensors)


def normal(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, device=DEVICE).to(dtype)


def heads_first(t: Tensor) -> Tensor:
    """The same tensor, heads before tokens in memory, as some layers lay them out."""
    return t.transpose(1, 2).contiguous().transpose(1, 2)


def draw_indices(shape: tuple[int, ...], num_blocks: int, repeated: bool = False) -> Tensor:
    """Block indices [B T R n] as a caller may give them: distinct ones in any order, empty slots,
    blocks ahead of the query, forced ones, and rows of none; with `repeated` some blocks twice."""
    order = torch.rand(*shape[:3], max(num_blocks + 2, shape[3])).argsort(-1)[..., : shape[3]]
    indices = torch.where(order < num_blocks, order, -1)
    indices[:, ::5] = -1
    if repeated:
        indices[:, ::3, :, 1:2] = indices[:, ::3, :, :1]
    return indices.to(DEVICE, torch.int32)


def draw(
    branch: str, dtype: torch.dtype = torch.float32, *, place: tuple[int, int] = PLACE,
    heads: tuple[int, int, int, int] = HEADS, batch: int = 2, causal: bool = True, memory: int = 2,
    lengths: list[int] | None = None, starts: tuple[int, ...] = (), n: int = 3, sinks: bool = False,
    gated: bool = False, each: bool = False, repeated: bool = False, raw: bool = False,
    window: str = "", leaders: Any = None, lie: Any = None, size: float = 1.0, **changes: Any,
) -> Call:  # fmt: skip
    """A call of a branch or of a layer.

    Args:
        place: lengths of queries and keys.
        heads: query heads, KV heads, and widths of keys and values.
        lengths: of packed documents, in place of `place`.
        starts: positions of the first query of each row, which else are the last of the keys.
        n: blocks that a query of the selected branch is given.
        each: query heads have block indices of their own.
        raw: queries of branch 1 of their own.
        window: "k" and "v", or one of them: what branch 3 has of its own.
        leaders: blocks of the rankings before the call.
        lie: lays out the tensors of tokens and windows.
        size: multiplies the queries: their logits are bounded by norms up to some size.
        changes: of the settings.
    """
    B, (T, N), (H, K, D_, E) = (1 if lengths else batch), place, heads
    if not causal and branch in LAYERS and not lengths:
        T = N
    if lengths:
        T = N = sum(lengths)
    settings = {**SETTINGS[branch], **changes, "causal": causal}
    d = settings.get("compress_block_sliding_stride", D)
    windows = sum(blocks.num_windows(each_, d, causal=causal) for each_ in lengths or [N])
    shapes = {
        "q": (B, T, H, D_), "k": (B, N, K, D_), "v": (B, N, K, E), "ck": (B, windows, K, D_),
        "cv": (B, windows, K, E), "mem_k": (K, memory, D_), "mem_v": (K, memory, E),
        "cq": (B, T, H, D_), "window_k": (B, N, K, D_), "window_v": (B, N, K, E),
        "branch_gates": (B, T, H, 3),
    }  # fmt: skip
    names = [name for name in READ[branch] if memory or not name.startswith("mem")]
    names += ["cq"] * raw + [f"window_{letter}" for letter in window]
    tensors = {name: normal(*shapes[name], dtype=dtype) for name in names}
    tensors["q"] = tensors["q"] * size
    if "branch_gates" in tensors:  # as a sigmoid gives them
        tensors["branch_gates"] = torch.rand(B, T, H, 3, device=DEVICE).to(dtype)
    if lie is not None:
        tensors |= {n: lie(t) for n, t in tensors.items() if not n.startswith("mem")}
    if sinks:
        high = torch.promote_types(dtype, torch.float32)
        tensors["sinks"] = normal(*SINKS.get(branch, ()), H, dtype=high)
    if branch == "selected":
        num_blocks = blocks.num_blocks(max(lengths or [N]), settings["selection_block_size"])
        shape = (B, T, H if each else K, n)
        settings["block_indices"] = draw_indices(shape, num_blocks, repeated)
        if gated:
            tensors["gates"] = torch.rand(shape, device=DEVICE).to(dtype) + 0.5
    if leaders is not None:
        ranked = H if each else K
        settings["leader_indices"] = torch.tensor(leaders, dtype=torch.int32, device=DEVICE)
        settings["leader_indices"] = settings["leader_indices"].expand(B, ranked, -1).contiguous()
    if branch in LAYERS and each:
        settings["query_heads_share_selected_kv"] = False
    if lengths:
        settings["cu_seqlens"] = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    elif starts:
        settings["q_offset"] = torch.tensor(starts, device=DEVICE)
    elif branch == "compressed":
        settings["seq_len"] = N
    return Call(OPERATIONS[branch], tensors, settings)


def under_selection(call: Call, block_indices: Tensor) -> Callable[..., Tensor]:
    """A layer as its branches, put together, with the selection given."""
    settings = call.settings
    shared = {
        n: settings[n] for n in ("causal", "soft_cap", "scale", "cu_seqlens") if n in settings
    }
    forced = ("selection_block_size", "num_initial_blocks", "num_local_blocks")
    forced = {n: settings[n] for n in forced if n in settings}

    def op(q, k, v, ck, cv=None, branch_gates=None, cq=None, mem_k=None, mem_v=None, window_k=None,
           window_v=None, sinks=None, *, backend):  # fmt: skip
        run = functools.partial
        selected = run(
            nsa.selected_attention, q, k, v, block_indices, **forced, **shared, backend=backend,
        )  # fmt: skip
        if branch_gates is None:
            return selected(sinks=None if sinks is None else sinks[0])
        window = (k if window_k is None else window_k, v if window_v is None else window_v)
        place = {} if "cu_seqlens" in settings else dict(seq_len=k.shape[1])
        compressed = run(
            nsa.compressed_attention, q if cq is None else cq, ck, cv, mem_k=mem_k, mem_v=mem_v,
            compress_block_sliding_stride=settings["compress_block_sliding_stride"], **place,
            **shared, backend=backend,
        )  # fmt: skip
        window = run(
            nsa.sliding_window_attention, q, *window,
            sliding_window_size=settings["sliding_window_size"], **shared, backend=backend,
        )  # fmt: skip
        branches = compressed, selected, window
        logits = [None] * 3 if sinks is None else sinks
        outs = [branch(sinks=sink) for branch, sink in zip(branches, logits)]
        return combine_branches(outs, branch_gates)

    return op
