"""`chunked_attention`: its masks and offsets, the tiles that it visits, its memory, and what it
refuses."""

import pytest
import torch

from native_sparse_attention import SegmentIds, chunked_attention
from tests.dense.test_dense import CHUNKS, SHAPES, assert_same, causal_mask, draw
from tests.dense.test_dense import dense as dense_of
from tests.helpers import memory


def dense(q, *tensors, scale=None, **settings):
    return dense_of(q, *tensors, scale=q.shape[-1] ** -0.5 if scale is None else scale, **settings)


MASKS = {
    "causal": dict(causal=True),
    "window": dict(sliding_window_size=3),
    "causal window": dict(causal=True, sliding_window_size=3),
    "own key": dict(causal=True, sliding_window_size=0),
    "wide window": dict(sliding_window_size=100),
    "offset": dict(causal=True, sliding_window_size=6, q_offset=2),
    "past the keys": dict(sliding_window_size=6, q_offset=8),
    "before the keys": dict(causal=True, q_offset=-3),
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("chunks", [(4, 8), (1, 3), (1024, 4096)])
def test_bands_in_chunks_of_any_size(name, shape, chunks):
    leaves, kw = draw(*SHAPES[shape]), MASKS[name]
    T, S = leaves[0].shape[1], leaves[1].shape[1]
    sizes = dict(q_chunk_size=chunks[0], k_chunk_size=chunks[1])
    actual = chunked_attention(*leaves, **kw, **sizes, return_lse=True)
    offset = kw.get("q_offset", S - T)  # by default the queries are the last tokens
    mask = causal_mask(T, S, offset, kw.get("sliding_window_size"), kw.get("causal", False))
    assert_same(actual, dense(*leaves, mask), leaves)


def test_rows_at_different_places():
    leaves = draw(2, 5, 16, 2, 1, 4, 4)
    offset = torch.tensor([3, 11])
    actual = chunked_attention(
        *leaves, causal=True, sliding_window_size=4, q_offset=offset, return_lse=True, **CHUNKS
    )
    mask = torch.cat([causal_mask(5, 16, int(o), 4) for o in offset])
    assert_same(actual, dense(*leaves, mask), leaves)


@pytest.mark.parametrize(
    "shape",
    [(2, 2, 13, 13), (2, 1, 13, 13), (1, 2, 1, 13), (2, 1, 13, 1), (13, 13), (13,), (1, 1), ()],
)
def test_masks_broadcast(shape):
    leaves = draw(2, 13, 13, 2, 1, 4, 4)
    mask = torch.rand(shape) < 0.6
    actual = chunked_attention(*leaves, mask=mask, return_lse=True, **CHUNKS)
    assert_same(actual, dense(*leaves, mask.expand(2, 2, 13, 13)), leaves)


def test_mask_mods_and_masks_of_every_kind_together():
    leaves = draw(2, 11, 19, 4, 2, 4, 4)
    ids = SegmentIds(torch.randint(0, 2, (2, 11)), torch.randint(0, 2, (2, 19)))
    mask = torch.rand(4, 11, 19) < 0.9
    asked = []

    def mod(b, h, i, j):
        answer = (i + j + h + b) % 3 != 0
        asked.append(answer.shape)
        return answer

    actual = chunked_attention(
        *leaves, causal=True, sliding_window_size=9, segment_ids=ids, soft_cap=2.0, scale=1.5,
        mask=mask, mask_mod=mod, return_lse=True, **CHUNKS,
    )  # fmt: skip
    b, h, i, j = torch.meshgrid(*map(torch.arange, (2, 4, 11, 19)), indexing="ij")
    seen = causal_mask(11, 19, 8, 9) & mask & ((i + j + h + b) % 3 != 0)
    seen = seen & (ids.q[:, :, None] == ids.kv[:, None])[:, None]
    assert not seen.any(-1).all(), "some row must see nothing"
    # i and j index the tensors, and no tile is larger than a chunk
    assert max(s[2] for s in asked) <= 4 and max(s[3] for s in asked) <= 8
    assert_same(actual, dense(*leaves, seen, scale=1.5, soft_cap=2.0), leaves)


def step(T, **kwargs):
    leaves = draw(1, T, T, 2, 1, 8, 8, torch.float32)
    return lambda: chunked_attention(*leaves, causal=True, **kwargs).sum().backward()


def test_memory_is_linear():
    sizes = dict(q_chunk_size=64, k_chunk_size=64)
    peaks = [memory.peak(step(T, **sizes)) for T in (128, 512)]
    assert peaks[1] < 5 * peaks[0], peaks
    # one chunk is a dense softmax: the measure notices
    dense_peaks = [memory.peak(step(T, q_chunk_size=T, k_chunk_size=T)) for T in (256, 1024)]
    assert dense_peaks[1] > 12 * dense_peaks[0], dense_peaks
