"""Settings by the letters of docs/semantics.md."""

LETTERS = dict(
    l="compress_block_size", d="compress_block_sliding_stride", s="selection_block_size",
    n="num_selected_blocks", w="sliding_window_size",
)  # fmt: skip


def sizes(l=None, d=None, s=None, n=None, w=None, **others):
    values = dict(l=l, d=d, s=s, n=n, w=w)
    return {LETTERS[x]: value for x, value in values.items() if value is not None} | others
