"""Mask mods: drawn by hand, by brute force, and their block masks."""

import pytest
import torch
from torch.nn.attention import flex_attention as flex

from native_sparse_attention import masks
from native_sparse_attention.masks import catalog
from tests.helpers.pictures import assert_torchs_tiles, dense, drawn

CPU = torch.device("cpu")

TWO_IMAGES = torch.tensor([[0, 3], [1, 4], [5, 6]])

PREFIX = torch.tensor([0, 2, 1])
DRAWN = {
    "causal": (masks.causal, "x... xx.. xxx. xxxx"),
    "sliding_window": (masks.sliding_window(2), "x.... xx... xxx.. .xxx. ..xxx"),
    "dilated_window": (
        masks.dilated_window(2, 2),
        """
        x......
        .x.....
        x.x....
        .x.x...
        x.x.x..
        .x.x.x.
        ..x.x.x
        """,
    ),
    "prefix_lm": (masks.prefix_lm(2), "xx... xx... xxx.. xxxx. xxxxx"),
    "an empty prefix": (masks.prefix_lm(0), "x.. xx. xxx"),
    "document, by offsets": (
        masks.document(offsets=torch.tensor([0, 2, 2, 5])),
        "x.... xx... ..x.. ..xx. ..xxx",
    ),
    "document, both sides": (
        masks.document(offsets=torch.tensor([0, 2, 5]), causal=False),
        "xx... xx... ..xxx ..xxx ..xxx",
    ),
    # ids in no order, and padding
    "document, by ids": (
        masks.document(torch.tensor([7, 3, 7, -1, 3, -1])),
        "x..... .x.... x.x... ...... .x..x. ......",
    ),
    # texts see images 0 and 1 overlapping; token 4 sees nothing
    "flamingo, by length": (
        masks.flamingo(TWO_IMAGES, image_token_length=2),
        """
        xx....
        xxxx..
        xxxx..
        ..xx..
        ......
        ....xx
        """,
    ),
    "flamingo, by ids": (
        masks.flamingo(TWO_IMAGES, torch.tensor([2, 0, 0, 0, 1])),
        """
        .xxx.
        .xxxx
        .xxxx
        ....x
        .....
        x....
        """,
    ),
    "flamingo, by narrow ids": (
        masks.flamingo(TWO_IMAGES, torch.tensor([2, 0, 1], dtype=torch.uint8)),
        ".x. .xx .xx ..x ... x..",
    ),
    # keys of no image are seen by no text
    "flamingo, by ids of other images": (
        masks.flamingo(TWO_IMAGES, torch.tensor([-1, 0, 7])),
        ".x. .x. .x. ... ... ...",
    ),
    "jagged window": (
        masks.jagged_mask_mod(masks.sliding_window(1), torch.tensor([0, 2, 3, 3, 6])),
        "x..... xx.... ..x... ...x.. ...xx. ....xx",
    ),
    "jagged, everything": (masks.jagged_mask_mod(None, torch.tensor([0, 2, 3])), "xx. xx. ..x"),
    "keys of their own": (
        masks.jagged_mask_mod(masks.causal, torch.tensor([0, 3, 5]), torch.tensor([0, 1, 4])),
        "x... x... x... .x.. .xx.",
    ),
    # a prefix of its own for every sequence
    "number of the sequence": (
        masks.jagged_mask_mod(lambda b, h, i, j: j < PREFIX[b], torch.tensor([0, 2, 5, 7])),
        "....... ....... ..xx... ..xx... ..xx... .....x. .....x.",
    ),
}


@pytest.mark.parametrize("name", DRAWN)
def test_drawn(name):
    mod, picture = DRAWN[name]
    expected = drawn(picture)
    assert torch.equal(dense(mod, *expected.shape), expected)


@pytest.mark.parametrize(
    ("height", "width", "rows", "columns"),
    [(5, 7, 3, 5), (7, 5, 7, 1), (1, 9, 1, 3), (4, 4, 3, 3), (3, 5, 3, 5), (3, 4, 9, 9)],
)
def test_canvases(height, width, rows, columns):
    """Pixel by pixel: what a kernel around it covers, cut at the border, or moved inside."""
    cut = torch.zeros(height * width, height * width, dtype=torch.bool)
    moved = cut.clone()
    for i in range(height * width):
        y, x = divmod(i, width)
        top, left = y - rows // 2, x - columns // 2
        inside = min(max(top, 0), height - rows), min(max(left, 0), width - columns)
        for mask, (first_y, first_x) in ((cut, (top, left)), (moved, inside)):
            for at_y in range(max(first_y, 0), min(first_y + rows, height)):
                for at_x in range(max(first_x, 0), min(first_x + columns, width)):
                    mask[i, at_y * width + at_x] = True
    assert torch.equal(dense(masks.sasa(height, width, rows, columns), height * width), cut)
    if rows <= height and columns <= width:
        natten = dense(masks.natten(height, width, rows, columns), height * width)
        assert torch.equal(natten, moved)
        assert (natten.sum(1) == rows * columns).all()


def test_documents_by_row_and_windows():
    ids = torch.tensor([[0, 0, 1, 1], [0, 1, 1, 1]])
    both = flex.create_mask(masks.document(ids), 2, 1, 4, 4, device="cpu")[:, 0]
    assert torch.equal(both, torch.stack([dense(masks.document(row), 4) for row in ids]))
    for window, causal in ((5, True), (40, False)):
        expected = dense(masks.sliding_window(window, causal), 33)
        assert torch.equal(dense(masks.dilated_window(window, 1, causal), 33), expected)


@pytest.mark.parametrize("name", catalog.CATALOG)
def test_block_masks_are_torchs(name, monkeypatch):
    """Tile for tile, strip by strip, at lengths that are no multiple of a tile."""
    monkeypatch.setattr(masks.nsa, "PAIRS_AT_ONCE", 2 * 128 * 400)
    options = {"canvas_width": 20} if "canvas_width" in catalog.options_of(name) else {}
    mod, q_len, kv_len = catalog.make(name, 400, CPU, **options)
    ours = masks.block_mask_of(mod, q_len, kv_len, "cpu")
    assert ours.shape == (1, 1, q_len, kv_len)
    assert_torchs_tiles(ours)
