"""The whole layer between projection and output: selection, three branches and their gates."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from .. import blocks
from ..block_sizes import BlockSizes, flat
from ..checks.tensors import (
    check_bools,
    check_documents,
    check_first_group,
    check_groups,
    check_leaders,
    check_memory,
    check_offset,
    check_same,
    check_shapes,
    check_sinks,
    check_weights,
    check_windows,
    shown,
)
from ..config import SELECTION, AttentionConfig
from ..varlen import Documents
from . import dispatch, flex
from .call import Call
from .packed import takes_documents
from .reference import attention as reference
from .triton import layer

# up to so many selected blocks, a call keeps a slot for each even if the sequence has fewer blocks
MANY_BLOCKS = 64


def check_flex_masks(sliding_window: Any, fine_selection: Any) -> None:
    if sliding_window is not None:
        from torch.nn.attention.flex_attention import BlockMask

        if not isinstance(sliding_window, BlockMask):
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
    """The whole layer between projection and output: selection, three branches and their gates
    (Eq. 5).

    `out = g_cmp compressed(cq, ck, cv) + g_sel selected(q, k, v) + g_win window(q, k, v)`.

    Args:
        q, k, v: [B, T, H, D], [B, S, K, D] and [B, S, K, E], with rotary embedding applied.
        ck, cv: compressed keys and values, [B, W, K, D] and [B, W, K, E].
        branch_gates: [B, T, H, 3], in the order compressed, selected, window.
        cq: queries of branch 1 and of the ranking, without rotary embedding; q by default.
        window_k, window_v: keys and values of branch 3; k and v by default.
        use_diff_topk: let gradients reach the scores through straight-through gates.
        return_indices: also return the selected block indices, [B, T, K or H, n].
        recompute: do not save branch outputs; the backward computes them again (Triton only; other
            backends save the tensors that autograd saves).
        block_sizes: replace the tile configs of the Triton kernels; other backends have none.
        sliding_window_flex_mask, fine_selection_flex_mask: masks of
            `native_sparse_attention.masks`. flex_attention then computes the branch under that
            mask.
        soft_cap: c; logits x of all branches become `c tanh(x / c)`.
        sinks: [3, H], for each branch and query head the logit of one more key with value 0.

    The remaining arguments are those of `compressed_attention`, `select_blocks`,
    `selected_attention` and `sliding_window_attention`. With `backend="flex"` the branches run in
    flex_attention and the ranking runs in eager PyTorch.

    Returns:
        [B, T, H, E], and with `return_indices` also the block indices.

    Raises:
        ValueError: shapes, dtypes, devices or settings do not match.
        NotImplementedError: no given backend supports the call.
    """
    (return_indices,) = check_bools(return_indices=return_indices)
    config = AttentionConfig(
        compress_block_size=compress_block_size,
        compress_block_sliding_stride=compress_block_sliding_stride,
        selection_block_size=selection_block_size,
        num_selected_blocks=num_selected_blocks,
        sliding_window_size=sliding_window_size,
        importance=importance,
        interpolated_importance_score=interpolated_importance_score,
        num_initial_blocks=num_initial_blocks,
        num_local_blocks=num_local_blocks,
        selection_stride=selection_stride,
        query_heads_share_selected_kv=query_heads_share_selected_kv,
        use_diff_topk=use_diff_topk,
        causal=causal,
        scale=scale,
        soft_cap=soft_cap,
        recompute=recompute,
        block_sizes=block_sizes,
    )
    tensors = (q, k, v, ck, cv, branch_gates, cq, mem_k, mem_v, window_k, window_v, sinks)
    call = Call(*tensors, q_offset, leader_indices, documents)
    masks = sliding_window_flex_mask, fine_selection_flex_mask
    out, block_indices = attend(call, config, backend, masks, keep_slots=return_indices)
    return (out, block_indices) if return_indices else out


def checked(call: Call, config: AttentionConfig, masks: tuple[Any, Any]) -> Call:
    """Check a call. Its offset becomes a number, or a tensor with one offset per sequence.

    Raises:
        ValueError: the tensors do not match one another or the settings.
    """
    q, mem_k, mem_v = call.q, call.mem_k, call.mem_v
    dims = check_shapes(
        q=(q, "B T H D"),
        cq=(call.cq, "B T H D"),
        k=(call.k, "B S K D"),
        v=(call.v, "B S K E"),
        ck=(call.ck, "B W K D"),
        cv=(call.cv, "B W K E"),
        mem_k=(mem_k, "K m D"),
        mem_v=(mem_v, "K m E"),
        window_k=(call.window_k, "B S K D"),
        window_v=(call.window_v, "B S K E"),
        branch_gates=(call.branch_gates, "B T H 3"),
    )
    inputs = call.tensors()
    check_same(**{name: inputs[name] for name in inputs if name not in ("branch_gates", "sinks")})
    check_weights("branch_gates", call.branch_gates, q.device)
    check_groups(dims["H"], dims["K"], (dims["T"], dims["S"]))
    check_memory(mem_k, mem_v)
    check_windows(dims["W"], dims["S"], config.d, causal=config.causal)
    offset = check_offset(call.q_offset, dims, dims["S"], config.causal, q.device)
    check_documents(call.documents, dims, offset, q.device)
    check_sinks(call.sinks, (3, dims["H"]), q.device)
    shared, leaders = config.query_heads_share_selected_kv, call.leader_indices
    check_leaders(leaders, dims, config.num_selected_blocks, shared, q.device)
    check_first_group(offset, config.selection_stride, leaders)
    check_flex_masks(*masks)
    beyond = [n for n in ("documents", "sinks") if getattr(call, n) is not None]
    if masks != (None, None) and (beyond or config.soft_cap is not None):
        raise ValueError(
            "sliding_window_flex_mask and fine_selection_flex_mask must be None with "
            f"{(beyond or ['soft_cap'])[0]}, which they know nothing of"
        )
    return call.at(offset)


def attend(
    call: Call,
    config: AttentionConfig,
    backend: str | tuple[str, ...],
    masks: tuple[Any, Any] = (None, None),
    keep_slots: bool = False,
) -> tuple[Tensor, Tensor]:
    """Check the tensors of a call and run it: the output [B T H E] and the selected block indices.
    Unless `keep_slots`, the indices may lack slots past the number of blocks."""
    call = checked(call, config, masks)
    n, s = config.num_selected_blocks, config.selection_block_size
    if n > MANY_BLOCKS and not keep_slots and call.leader_indices is None:
        # the caller does not read the slots past the last block
        n = min(n, max(MANY_BLOCKS, blocks.num_blocks(call.k.shape[1], s)))
        config = config.with_selected(n)
    name = dispatch.choose(
        backend, "native_sparse_attention", call.q, call.k, call.v, q_offset=call.q_offset,
        num_selected_blocks=n, selection_block_size=s,
    )  # fmt: skip
    if name == "triton" and masks == (None, None):
        return layer.native_sparse_attention(call, config)
    return by_branches(call, config, backend, masks)


def by_branches(
    call: Call,
    config: AttentionConfig,
    backend: str | tuple[str, ...],
    masks: tuple[Any, Any],
) -> tuple[Tensor, Tensor]:
    """Run each branch with the first backend that supports it, and combine the outputs."""
    q, k, v, ck, cv = call.q, call.k, call.v, call.ck, call.cv
    cq = q if call.cq is None else call.cq
    sink_cmp, sink_sel, sink_win = (None,) * 3 if call.sinks is None else call.sinks
    diff, sizes = config.use_diff_topk, flat(config.block_sizes)
    common: dict[str, Any] = dict(
        causal=config.causal, q_offset=call.q_offset, scale=config.scale, soft_cap=config.soft_cap,
        documents=call.documents,
    )  # fmt: skip
    forced = {name: getattr(config, name) for name in ("num_initial_blocks", "num_local_blocks")}

    out_cmp = dispatch.run(
        backend, "compressed_attention", cq, ck, cv, mem_k=call.mem_k, mem_v=call.mem_v,
        sinks=sink_cmp, compress_block_sliding_stride=config.d, return_lse=False,
        block_sizes=sizes, **common,
    )  # fmt: skip
    block_indices, gates = dispatch.run(
        backend,
        "select_blocks",
        cq if diff else cq.detach(),
        ck if diff else ck.detach(),
        mem_k=call.mem_k if diff or call.mem_k is None else call.mem_k.detach(),
        seq_len=k.shape[1],
        leader_indices=call.leader_indices,
        return_gates=diff,
        sinks=sink_cmp if diff or sink_cmp is None else sink_cmp.detach(),
        **{name: getattr(config, name) for name in SELECTION},
        **common,
    )
    s, w = config.selection_block_size, config.sliding_window_size
    window_mask, fine_mask = masks
    if fine_mask is None:
        out_sel = dispatch.run(
            backend, "selected_attention", q, k, v, block_indices, gates=gates, sinks=sink_sel,
            selection_block_size=s, return_lse=False, block_sizes=sizes, **forced, **common,
        )  # fmt: skip
    elif gates is not None:
        raise NotImplementedError(
            "flex_attention has no differentiable top-k: leave out fine_selection_flex_mask, "
            "or set use_diff_topk=False"
        )
    else:
        out_sel = flex.selected_under_mask(
            q, k, v, block_indices, fine_mask, selection_block_size=s, causal=config.causal,
            scale=config.scale, **forced,
        )  # fmt: skip
    window_k = k if call.window_k is None else call.window_k
    window_v = v if call.window_v is None else call.window_v
    if window_mask is None:
        out_win = dispatch.run(
            backend, "sliding_window_attention", q, window_k, window_v, sinks=sink_win,
            sliding_window_size=w, return_lse=False, block_sizes=sizes, **common,
        )  # fmt: skip
    else:
        out_win = flex.under_mask(q, window_k, window_v, window_mask, config.scale)
    out = reference.combine_branches((out_cmp, out_sel, out_win), call.branch_gates)
    return out, block_indices
