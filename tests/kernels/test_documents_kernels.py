"""Packed documents on the kernels, by the budget of errors against the specification over the same
documents."""

import pytest
import torch

from native_sparse_attention import (
    compressed_attention,
    native_sparse_attention,
    select_blocks,
    selected_attention,
    sliding_window_attention,
)
from native_sparse_attention import varlen as docs
from tests.helpers.budget import CUDA, DEVICE, assert_right
from tests.ops.test_documents import CAUSAL, SELECTIONS, SIZES, bounds, draw

# on the kernels, by the budget of errors against the specification over the same documents

DTYPES = [torch.float32, torch.bfloat16] if CUDA else [torch.float32]
# more than a tile, and several in one
MANY = [37, 3, 0, 1, 16, 25] if CUDA else [21, 3, 0, 1, 16, 9]


def single(causal, d=4, H=2, K=1, lengths=MANY):
    tensors, memory = draw(lengths, d, causal, H, K, D=16, dtype=torch.float32)
    return {n: t.detach() for n, t in (tensors | memory).items()}


@pytest.mark.kernels
@CAUSAL
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("m", [0, 2])
def test_compressed_by_kernels(m, dtype, causal):
    tensors = single(causal)
    names = ("q", "ck", "cv", "mem_k", "mem_v")[: 5 if m else 3]
    assert_right(
        compressed_attention, {n: tensors[n] for n in names}, dtype, causal=causal,
        compress_block_sliding_stride=4, return_lse=True, cu_seqlens=bounds(MANY),
    )  # fmt: skip


@pytest.mark.kernels
@CAUSAL
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("w", [6, 30])
def test_window_by_kernels(w, dtype, causal):
    tensors = single(causal)
    assert_right(
        sliding_window_attention, {n: tensors[n] for n in ("q", "k", "v")}, dtype, causal=causal,
        sliding_window_size=w, return_lse=True, cu_seqlens=bounds(MANY),
    )  # fmt: skip


@pytest.mark.kernels
@CAUSAL
@pytest.mark.parametrize("op", [compressed_attention, sliding_window_attention])
def test_keys_behind_a_document_by_kernels(op, causal):
    """What aligned rows hold between a document's last token and the next one is seen by no token
    and has no gradient, however much of a tile it fills."""
    T, last = 61, 34
    tensors = single(causal, d=1, H=8, lengths=[T])
    queries, names = tensors["q"], ("k", "v")
    settings = dict(sliding_window_size=T)
    if op is compressed_attention:
        names, settings = ("ck", "cv"), dict(compress_block_sliding_stride=1, seq_len=T)
    leaves = [tensors[n][:, :T].requires_grad_() for n in names]
    documents = docs.Documents(
        *(torch.full((1, T), at, dtype=torch.int32, device=DEVICE) for at in (0, last))
    )
    out = op(queries, *leaves, causal=causal, documents=documents, backend="triton", **settings)
    for grad in torch.autograd.grad(out[:, :last].sum(), leaves):
        assert grad[:, last:].eq(0).all() and grad[:, : last - 1].ne(0).any()


@pytest.mark.slow(one_of=3)
@pytest.mark.kernels
@CAUSAL
@pytest.mark.parametrize("setting", SELECTIONS)
def test_selection_by_kernels(setting, causal):
    """The lists of the specification in fp64: scores of random tensors lie further apart than
    float32 rounds."""
    kwargs = SIZES | dict(num_selected_blocks=2) | SELECTIONS[setting]
    tensors = single(causal, kwargs["compress_block_sliding_stride"], H=4, K=2)
    tensors = {n: tensors[n] for n in ("q", "ck", "mem_k")}
    kwargs |= dict(causal=causal, cu_seqlens=bounds(MANY))
    lists = select_blocks(**tensors, backend="triton", **kwargs)
    exact = select_blocks(**{n: t.double() for n, t in tensors.items()}, backend="eager", **kwargs)
    assert torch.equal(lists, exact)


@pytest.mark.slow(one_of=3)
@pytest.mark.kernels
@CAUSAL
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("H, initial, local", [(2, 0, 1), (2, 1, 2), (2, 2, 0), (9, 1, 2)])
def test_selected_by_kernels(H, initial, local, dtype, causal):
    """Block by block and, of many heads, query by query; with gates."""
    lengths = MANY if H == 2 else MANY[1:5]
    tensors = single(causal, H=H, lengths=lengths)
    shape = (1, sum(lengths), 1, 8)
    lists = torch.rand(shape, device=DEVICE).argsort(-1)[..., :3].to(torch.int32) - 1
    tensors = {n: tensors[n] for n in ("q", "k", "v")}
    tensors["gates"] = torch.rand(lists.shape, device=DEVICE)
    assert_right(
        selected_attention, tensors, dtype, return_lse=True, causal=causal, selection_block_size=8,
        num_initial_blocks=initial, num_local_blocks=local, cu_seqlens=bounds(lengths),
        block_indices=lists,
    )  # fmt: skip


LAYERS = ["default", "forced", "stride", "diff, probs, initial"]
LAYERS += ["no local", "interpolated", "diff"] if CUDA else []


@pytest.mark.slow(one_of=3)
@pytest.mark.kernels
@pytest.mark.parametrize("setting, causal", [(s, i % 3 > 0) for i, s in enumerate(LAYERS)])
def test_whole_layer_by_kernels(setting, causal):
    """With local blocks within the window, and reaching past it where branch 1 has no queries of
    its own."""
    settings = SELECTIONS.get(setting, dict(use_diff_topk=True))
    if setting.endswith("initial"):
        settings = settings | dict(importance="probs", num_initial_blocks=1)
    kwargs = SIZES | dict(num_selected_blocks=2, sliding_window_size=21) | settings
    tensors = single(causal, kwargs["compress_block_sliding_stride"])
    if setting in ("stride", "diff"):
        del tensors["cq"]
        kwargs |= dict(recompute=True, sliding_window_size=3)
    assert_right(
        native_sparse_attention, tensors, torch.float32, causal=causal, cu_seqlens=bounds(MANY),
        **kwargs,
    )  # fmt: skip
