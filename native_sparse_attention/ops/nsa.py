"""The whole layer between projection and output: selection, three branches, and the gate."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from .. import blocks
from ..checks.tensors import (
    check_bools,
    check_documents,
    check_first_group,
    check_groups,
    check_int,
    check_leaders,
    check_memory,
    check_offset,
    check_positive,
    check_same,
    check_scale,
    check_selection,
    check_shapes,
    check_sinks,
    check_weights,
    check_windows,
    shown,
)
from ..varlen import Documents
from . import dispatch, flex
from .block_sizes import BlockSizes, flat
from .functional import compressed_attention, selected_attention, sliding_window_attention
from .functional_selection import select_blocks
from .packed import takes_documents
from .reference import attention as reference
from .triton import layer

# selected blocks up to which a call does not ask how many blocks there are
MANY_BLOCKS = 64


def check_flex_masks(sliding_window: Any, fine_selection: Any) -> None:
    if sliding_window is not None and not isinstance(sliding_window, BlockMask):
        raise ValueError(
            "sliding_window_flex_mask must be a BlockMask, as create_sliding_mask makes it, "
            f"got {shown(sliding_window)}"
        )
    if fine_selection is not None and not callable(fine_selection):
        raise ValueError(
            "fine_selection_flex_mask must be a function, as create_fine_mask makes it, "
            f"got {shown(fine_selection)}"
        )


@takes_documents
def native_sparse_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    ck: Tensor,
    cv: Tensor,
    branch_gates: Tensor,
    *,
    compress_block_size: int,
    compress_block_sliding_stride: int,
    selection_block_size: int,
    num_selected_blocks: int,
    sliding_window_size: int,
    cq: Tensor | None = None,
    mem_k: Tensor | None = None,
    mem_v: Tensor | None = None,
    window_k: Tensor | None = None,
    window_v: Tensor | None = None,
    importance: str = "logits",
    interpolated_importance_score: bool = False,
    num_initial_blocks: int = 0,
    num_local_blocks: int = 1,
    selection_stride: int = 1,
    query_heads_share_selected_kv: bool = True,
    use_diff_topk: bool = False,
    causal: bool = True,
    q_offset: int | Tensor | None = None,
    leader_indices: Tensor | None = None,
    scale: float | None = None,
    return_indices: bool = False,
    recompute: bool = False,
    block_sizes: BlockSizes | None = None,
    soft_cap: float | None = None,
    sinks: Tensor | None = None,
    documents: Documents | None = None,
    sliding_window_flex_mask: Any = None,
    fine_selection_flex_mask: Callable[..., Any] | None = None,
    backend: str | tuple[str, ...] = "auto",
) -> Any:
    """The whole layer between projection and output: selection, three branches, and the gate
    (Eq. 5).

    `out = g_cmp compressed(cq, ck, cv) + g_sel selected(q, k, v) + g_win window(q, k, v)`.

    Args:
        q, k, v: [B, T, H, D], [B, S, K, D] and [B, S, K, E], with rotary embedding applied.
        ck, cv: compressed keys and values, [B, W, K, D] and [B, W, K, E].
        branch_gates: [B, T, H, 3], in the order compressed, selected, window.
        cq: queries of branch 1 and of the scoring, without rotary embedding; q where not given.
        window_k, window_v: keys and values of branch 3; k and v where not given.
        use_diff_topk: let gradients reach the scores through straight-through gates.
        return_indices: also return the selected block indices, [B, T, K or H, n].
        recompute: keep no branch's output for the backward, which then forms them again (Triton
            only; other backends keep what autograd keeps).
        block_sizes: tiles of the Triton kernels, in place of their own; other backends have none.
        sliding_window_flex_mask, fine_selection_flex_mask: masks of
            `native_sparse_attention.masks`; the branch is then computed by flex_attention under
            that mask.
        soft_cap: c, logits x of all branches become `c tanh(x / c)`.
        sinks: [3, H], for each branch and query head the logit of one more key, whose value is 0.

    The remaining arguments are those of `compressed_attention`, `select_blocks`,
    `selected_attention` and `sliding_window_attention`. With `backend="flex"` the branches run in
    flex_attention and the scoring, which it has no form of, in eager PyTorch.

    Returns:
        [B, T, H, E], and with `return_indices` also the block indices.

    Raises:
        ValueError: shapes, dtypes, devices or settings that do not fit.
        NotImplementedError: an explicit backend that cannot run the call.
    """
    dims = check_shapes(
        q=(q, "B T H D"),
        cq=(cq, "B T H D"),
        k=(k, "B S K D"),
        v=(v, "B S K E"),
        ck=(ck, "B W K D"),
        cv=(cv, "B W K E"),
        mem_k=(mem_k, "K m D"),
        mem_v=(mem_v, "K m E"),
        window_k=(window_k, "B S K D"),
        window_v=(window_v, "B S K E"),
        branch_gates=(branch_gates, "B T H 3"),
    )
    tensors: dict[str, Any] = dict(
        cq=cq, mem_k=mem_k, mem_v=mem_v, window_k=window_k, window_v=window_v
    )
    check_same(q=q, k=k, v=v, ck=ck, cv=cv, **tensors)
    check_weights("branch_gates", branch_gates, q.device)
    causal, use_diff_topk, return_indices, recompute = check_bools(
        causal=causal,
        use_diff_topk=use_diff_topk,
        return_indices=return_indices,
        recompute=recompute,
    )
    check_groups(dims["H"], dims["K"], (dims["T"], dims["S"]))
    check_memory(mem_k, mem_v)
    sliding_window_size = check_int("sliding_window_size", sliding_window_size, 0)
    settings = check_selection(
        compress_block_size=compress_block_size,
        compress_block_sliding_stride=compress_block_sliding_stride,
        selection_block_size=selection_block_size,
        num_selected_blocks=num_selected_blocks,
        importance=importance,
        interpolated_importance_score=interpolated_importance_score,
        num_initial_blocks=num_initial_blocks,
        num_local_blocks=num_local_blocks,
        selection_stride=selection_stride,
        query_heads_share_selected_kv=query_heads_share_selected_kv,
    )
    d, s, n, stride = (
        settings[name]
        for name in (
            "compress_block_sliding_stride", "selection_block_size", "num_selected_blocks",
            "selection_stride",
        )
    )  # fmt: skip
    check_windows(dims["W"], dims["S"], d, causal=causal)
    offset = check_offset(q_offset, dims, dims["S"], causal, q)
    check_documents(documents, dims, offset, q)
    soft_cap = check_positive("soft_cap", soft_cap)
    scale = check_scale(scale)
    check_sinks(sinks, (3, dims["H"]), q.device)
    shared = settings["query_heads_share_selected_kv"]
    check_leaders(leader_indices, dims, n, shared, q)
    check_first_group(offset, stride, leader_indices)
    sizes = flat(block_sizes)
    if n > MANY_BLOCKS and not return_indices and leader_indices is None:
        # nobody sees the slots past the last block
        n = min(n, max(MANY_BLOCKS, blocks.num_blocks(dims["S"], s)))
        settings["num_selected_blocks"] = n
    check_flex_masks(sliding_window_flex_mask, fine_selection_flex_mask)
    given_masks = sliding_window_flex_mask, fine_selection_flex_mask
    beyond = [n for n, t in (("documents", documents), ("sinks", sinks)) if t is not None]
    if given_masks != (None, None) and (beyond or soft_cap is not None):
        raise ValueError(
            "sliding_window_flex_mask and fine_selection_flex_mask must be None with "
            f"{(beyond or ['soft_cap'])[0]}, which they know nothing of"
        )
    name = dispatch.choose(
        backend,
        "native_sparse_attention",
        q,
        k,
        v,
        q_offset=offset,
        num_selected_blocks=n,
        selection_block_size=s,
    )
    if name == "triton" and given_masks == (None, None):
        out, lists = layer.native_sparse_attention(
            q,
            k,
            v,
            ck,
            cv,
            branch_gates,
            **tensors,
            sliding_window_size=sliding_window_size,
            causal=causal,
            q_offset=offset,
            leader_indices=leader_indices,
            scale=scale,
            recompute=recompute,
            use_diff_topk=use_diff_topk,
            block_sizes=sizes,
            soft_cap=soft_cap,
            sinks=sinks,
            documents=documents,
            **settings,
        )
        return (out, lists) if return_indices else out

    cq = q if cq is None else cq
    sink_cmp, sink_sel, sink_win = (None,) * 3 if sinks is None else sinks
    place: dict[str, Any] = dict(
        causal=causal, q_offset=offset, scale=scale, soft_cap=soft_cap, documents=documents,
        backend=backend,
    )  # fmt: skip
    forced = {name: settings[name] for name in ("num_initial_blocks", "num_local_blocks")}
    out_cmp = compressed_attention(
        cq,
        ck,
        cv,
        compress_block_sliding_stride=d,
        mem_k=mem_k,
        mem_v=mem_v,
        seq_len=dims["S"],
        sinks=sink_cmp,
        block_sizes=block_sizes,
        **place,
    )
    selection = select_blocks(
        cq if use_diff_topk else cq.detach(),
        ck if use_diff_topk else ck.detach(),
        mem_k=mem_k if use_diff_topk or mem_k is None else mem_k.detach(),
        seq_len=dims["S"],
        leader_indices=leader_indices,
        return_gates=use_diff_topk,
        sinks=sink_cmp if use_diff_topk or sink_cmp is None else sink_cmp.detach(),
        **settings,
        **place,
    )
    block_indices, gates = selection if use_diff_topk else (selection, None)

    if fine_selection_flex_mask is not None:
        if gates is not None:
            raise NotImplementedError(
                "flex_attention has no differentiable top-k: leave out fine_selection_flex_mask, "
                "or set use_diff_topk=False"
            )
        out_sel = flex.selected_under_mask(
            q,
            k,
            v,
            block_indices,
            fine_selection_flex_mask,
            selection_block_size=s,
            causal=causal,
            scale=scale,
            **forced,
        )
    else:
        out_sel = selected_attention(
            q,
            k,
            v,
            block_indices,
            selection_block_size=s,
            gates=gates,
            sinks=sink_sel,
            block_sizes=block_sizes,
            **forced,
            **place,
        )

    window_k, window_v = k if window_k is None else window_k, v if window_v is None else window_v
    if sliding_window_flex_mask is not None:
        out_win = flex.under_mask(q, window_k, window_v, sliding_window_flex_mask, scale)
    else:
        out_win = sliding_window_attention(
            q,
            window_k,
            window_v,
            sliding_window_size=sliding_window_size,
            sinks=sink_win,
            block_sizes=block_sizes,
            **place,
        )

    out = reference.combine_branches((out_cmp, out_sel, out_win), branch_gates)
    return (out, block_indices) if return_indices else out
