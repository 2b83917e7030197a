"""The whole layer between projection and output: selection, three branches and their gates."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from ..block_sizes import BlockSizes
from ..checks import (
    BRANCHES,
    FLOAT_DTYPES,
    check_bools,
    check_documents,
    check_first_group,
    check_given,
    check_groups,
    check_leaders,
    check_memory,
    check_offset,
    check_same,
    check_shapes,
    check_tensor,
    check_windows,
    describe,
)
from ..config import AttentionConfig
from ..varlen import Documents
from . import branches as branches_of
from . import dispatch
from .call import Call, DecodeInputs
from .packed import takes_documents


def check_flex_masks(sliding_window: Any, fine_selection: Any) -> None:
    if sliding_window is not None:
        from torch.nn.attention.flex_attention import BlockMask

        if not isinstance(sliding_window, BlockMask):
            raise ValueError(
                "sliding_window_flex_mask must be a BlockMask, as create_sliding_mask makes it, "
                f"got {describe(sliding_window)}"
            )
    if fine_selection is not None and not callable(fine_selection):
        raise ValueError(
            "fine_selection_flex_mask must be a function, as create_fine_mask makes it, "
            f"got {describe(fine_selection)}"
        )


@takes_documents
def native_sparse_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    ck: Tensor | None = None,
    cv: Tensor | None = None,
    branch_gates: Tensor | None = None,
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
    branches: tuple[str, ...] = BRANCHES,
    dense_length: int = 0,
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
        ck, cv: compressed keys and values, [B, W, K, D] and [B, W, K, E]. Without the compressed
            branch, cv is None, and ck only ranks blocks.
        branch_gates: [B, T, H, branches], in the order compressed, selected, window; None for one
            branch, which has no gate.
        branches: some of the three; tensors of the others must be None. `("selected",)` is one
            softmax over the initial, local and ranked blocks.
        dense_length: with `("selected",)` queries at positions below it attend to all keys that
            they may see; not causal: in sequences of at most this length.
        cq: queries of branch 1 and of the ranking, without rotary embedding; q by default. Without
            the compressed branch cq and ck may have another width, and cq one query for each KV
            head, [B, T, K, I].
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
        sinks: [branches, H], for each branch and query head the logit of one more key with value 0.

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
        selection_block_size=selection_block_size, num_selected_blocks=num_selected_blocks,
        sliding_window_size=sliding_window_size, importance=importance,
        interpolated_importance_score=interpolated_importance_score,
        num_initial_blocks=num_initial_blocks, num_local_blocks=num_local_blocks,
        selection_stride=selection_stride,
        query_heads_share_selected_kv=query_heads_share_selected_kv, branches=branches,
        dense_length=dense_length, scale=scale, soft_cap=soft_cap, causal=causal,
        use_diff_topk=use_diff_topk, recompute=recompute, block_sizes=block_sizes,
    )  # fmt: skip
    call = Call(
        q, k, v, ck, cv, branch_gates, cq, mem_k, mem_v, window_k, window_v, sinks,
        leader_indices=leader_indices, documents=documents, q_offset=q_offset,
    )  # fmt: skip
    masks = sliding_window_flex_mask, fine_selection_flex_mask
    call = checked(call, config, masks)
    name = dispatch.choose(backend, "native_sparse_attention", call, config)
    out, block_indices = branches_of.attend(call, config, name, masks, keep_slots=return_indices)
    return (out, block_indices) if return_indices else out


AXES = dict(
    q="B T H D", cq="B T H D", k="B S K D", v="B S K E", ck="B W K D", cv="B W K E", mem_k="K m D",
    mem_v="K m E", window_k="B S K D", window_v="B S K E",
)  # fmt: skip


def check_tensors(
    call: Call | DecodeInputs, config: AttentionConfig, axes: dict[str, str], **others: Any
) -> dict[str, int]:
    """Check that the branches have their tensors and masks, no others are given, and that they
    match; `axes` differ from those of `AXES`. `others` are masks. Returns the sizes of the axes."""
    branches, ranks = config.branches, config.compresses
    has_cmp, has_sel, has_win = (branch in branches for branch in BRANCHES)
    reads = dict(
        ck=ranks, cq=ranks, cv=has_cmp, mem_k=has_cmp, mem_v=has_cmp,
        fine_selection_flex_mask=has_sel, window_k=has_win, window_v=has_win,
        sliding_window_flex_mask=has_win, branch_gates=len(branches) > 1,
    )  # fmt: skip
    tensors = {name: getattr(call, name) for name in AXES}
    gates, device = call.branch_gates, call.q.device
    arguments = tensors | others | dict(branch_gates=gates)
    for name, has_use in reads.items():
        if not has_use and arguments.get(name) is not None:
            raise ValueError(f"{name} must be None with branches={branches}, which do not read it")
    check_given(**{name: arguments[name] for name in ("ck", "cv", "branch_gates") if reads[name]})
    shapes = {name: (tensors[name], spec) for name, spec in (AXES | axes).items()}
    dims = check_shapes(**shapes, branch_gates=(gates, f"B T H {len(branches)}"))
    check_same(**tensors)
    check_tensor("branch_gates", gates, FLOAT_DTYPES, device)
    check_tensor("sinks", call.sinks, FLOAT_DTYPES, device, (len(branches), dims["H"]))
    check_groups(dims["H"], dims["K"], (dims["T"], dims.get("S", 0)))
    check_memory(call.mem_k, call.mem_v)
    return dims


def checked(call: Call, config: AttentionConfig, masks: tuple[Any, Any]) -> Call:
    """Check a call. Its offset becomes a number, or a tensor with one offset per sequence.

    Raises:
        ValueError: the tensors do not match one another or the settings.
    """
    q, axes = call.q, {}
    # queries and keys that only rank may have a width of their own, and a query for each KV head
    has_ranking_queries = call.cq is not None and "compressed" not in config.branches
    if has_ranking_queries:
        axes = dict(cq="B T R I", ck="B W K I")
    dims = check_tensors(
        call, config, axes, sliding_window_flex_mask=masks[0], fine_selection_flex_mask=masks[1]
    )
    if has_ranking_queries and dims["R"] not in (dims["H"], dims["K"]):
        raise ValueError(f"cq must have H={dims['H']} or K={dims['K']} heads, got {dims['R']}")
    if call.ck is not None:
        check_windows(dims["W"], dims["S"], config.d, causal=config.causal)
    offset = check_offset(call.q_offset, dims, dims["S"], config.causal, q.device)
    check_documents(call.documents, dims, offset, q.device)
    shared, leaders = config.query_heads_share_selected_kv, call.leader_indices
    check_leaders(leaders, dims, config.num_selected_blocks, shared, q.device)
    if config.ranks:
        check_first_group(offset, config.selection_stride, leaders)
    check_flex_masks(*masks)
    unsupported = [n for n in ("documents", "sinks") if getattr(call, n) is not None]
    if masks != (None, None) and (unsupported or config.soft_cap is not None):
        raise ValueError(
            "sliding_window_flex_mask and fine_selection_flex_mask must be None with "
            f"{(unsupported or ['soft_cap'])[0]}, which they know nothing of"
        )
    return call.but(q_offset=offset)
