"""Selections drawn at random, scored in float64, and what a kernel may have chosen of them."""

import torch

from native_sparse_attention import blocks, select_blocks
from native_sparse_attention.config import AttentionConfig
from native_sparse_attention.ops import reference
from native_sparse_attention.ops.call import Call
from tests.helpers.budget import CUDA, DEVICE, running
from tests.helpers.sizes import sizes

# Triton's interpreter has no bfloat16
DTYPE = torch.bfloat16 if CUDA else torch.float16

SETTINGS = sizes(
    8, 4, 8, n=3, importance="logits", interpolated_importance_score=False, num_initial_blocks=1,
    num_local_blocks=1, selection_stride=1, query_heads_share_selected_kv=True, causal=True,
)  # fmt: skip
RULES = {
    "logits": dict(importance="logits"),
    "interpolated": dict(interpolated_importance_score=True),
    "probs": dict(importance="probs"),
    "max": dict(importance="max"),
    "head_max": dict(importance="head_max"),
}


def draw(T, S, H, K, D, *, d=4, causal=True, m=2, dtype=DTYPE, B=2):
    """q, ck and mem_k."""
    W = blocks.num_windows(S, d, causal=causal)
    shapes = (B, T, H, D), (B, W, K, D), (K, m, D)
    q, ck, mem_k = (torch.randn(shape, device=DEVICE).to(dtype) for shape in shapes)
    return q, ck, mem_k if m else None


def candidates(i, C, config):
    """Which of blocks 0 .. C - 1 queries at positions i may rank, [b|1 1 i c]."""
    d, s = config.d, config.selection_block_size
    c = torch.arange(C, device=i.device)
    ranked = ~reference.forced_blocks(i, c, config)
    if config.causal:
        own = (i // s)[..., None]
        ranked = ranked & (c < own) & (c < blocks.num_complete_blocks(i, d, s)[..., None])
    return ranked[:, None]


def scores(q, ck, mem_k, i, C, config, dtype):
    """[b r i c], formed in `dtype`."""
    q, ck, mem_k = (None if t is None else t.to(dtype) for t in (q, ck, mem_k))
    visible = reference.visible_windows(i, ck.shape[1], config.d, config.causal)
    blocks = torch.arange(C, device=q.device)
    return reference.importance_scores(q, ck, mem_k, visible, blocks, config).double()


def rounding(q, ck, mem_k, settings, scale, exact):
    """One float32 ulp of a score's terms: those of a logit or, `probs`, of an exponent. With `max`
    the kernel also rounds mean queries of 16 bits to float16, in units of their largest element."""
    keys = max(t.double().norm(dim=-1).max() for t in (ck, mem_k) if t is not None)
    scale = q.shape[-1] ** -0.5 if scale is None else abs(scale)
    logits = q.double().norm(dim=-1).max() * keys * scale
    eps = torch.finfo(torch.float32).eps
    if "max" in settings["importance"] and q.dtype != torch.float32:
        half = 2**-12 * q.abs().max() * ck.abs().sum(-1).max() * scale
        return eps * logits + half.double()
    if settings["importance"] != "probs":
        return eps * logits
    return eps * (1 + 2 * logits) * exact.max()


def assert_right(q, ck, mem_k, S, q_offset=None, scale=None, backend="triton", **changed):
    """A score may err by twice what eager PyTorch errs in the same dtype, and one float32 ulp of
    its terms; so the block in place j differs by at most twice that from the j-th best."""
    settings = {**SETTINGS, **changed}
    T, R = q.shape[1], settings["selection_stride"]
    start = S - T if q_offset is None else q_offset
    call = dict(settings, seq_len=S, mem_k=mem_k, q_offset=start, scale=scale)
    with running(backend) as name:
        actual = select_blocks(q, ck, **call, backend=name)
    config = AttentionConfig(**settings, scale=scale)
    expected = reference.select_blocks(
        Call(q, ck=ck, mem_k=mem_k, q_offset=start, seq_len=S), config
    )
    assert actual.dtype == torch.int32 and actual.shape == expected.shape
    assert torch.equal(actual < 0, expected < 0)

    i = reference.query_positions(q, start)
    if R > 1:
        # hold the leaders to their scores, and their groups to the leaders
        call, leading, first, group = reference.ranked_queries(Call(q, q_offset=start), config)
        ranked = actual.gather(1, first[..., None, None].expand(-1, -1, *actual.shape[2:]))
        assert torch.equal(actual, reference.share(ranked, group, actual.new_full((), -1)))
        q, i, actual = call.q, leading, ranked
    actual = actual.transpose(1, 2).long()
    d, s = settings["compress_block_sliding_stride"], settings["selection_block_size"]
    C = blocks.num_complete_blocks(ck.shape[1] * d, d, s)
    C = C if settings["causal"] else blocks.num_blocks(S, s)
    if C == 0:
        return
    exact, low = (
        scores(q, ck, mem_k, i, C, config, dtype) for dtype in (torch.float64, torch.float32)
    )
    ranked = candidates(i, C, config).expand_as(exact)
    is_block = actual >= 0
    assert (ranked.gather(-1, actual.clamp(min=0)) | ~is_block).all(), "no candidate was chosen"
    chosen = torch.where(is_block, actual, -1 - torch.arange(actual.shape[-1], device=DEVICE))
    assert (chosen.sort(dim=-1).values.diff(dim=-1) != 0).all(), "a block was chosen twice"
    if not is_block.any():
        return
    eager = (low - exact).abs().masked_fill(~ranked, 0).max()
    budget = 2 * eager + rounding(q, ck, mem_k, settings, scale, exact[ranked])
    best = exact.masked_fill(~ranked, float("-inf")).sort(dim=-1, descending=True).values
    best = torch.nn.functional.pad(best, (0, actual.shape[-1]))[..., : actual.shape[-1]]
    error = (exact.gather(-1, actual.clamp(min=0)) - best).abs()[is_block].max()
    assert error <= 2 * budget, f"{error:.2e} > 2 x {budget:.2e}"
