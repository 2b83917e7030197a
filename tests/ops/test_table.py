"""The table: each branch, and the layer, on each backend, in each case and dtype. Outputs,
log-sum-exps and every gradient, within the budget of errors against the specification in fp64.

Without a GPU the kernels run in Triton's interpreter, which has no bfloat16, and flex_attention has
no gradients. `test_reference.py` holds the specification to its definitions, in the same cases.
"""

import functools

import pytest
import torch

from tests.helpers import selections
from tests.helpers.budget import CUDA, DEVICE, assert_right, running
from tests.helpers.calls import (
    BLOCK,
    DOCUMENTS,
    HEADS,
    PLACE,
    S,
    draw,
    heads_first,
    under_selection,
)
from tests.helpers.sizes import sizes

B, PRIME = BLOCK, 131 if CUDA else 37
WIDTH = HEADS[2]
COMMON = {
    **{f"{n} tokens": dict(place=(n, n)) for n in (1, B - 1, B, B + 1, 2 * B + 1)},
    "a prime of tokens": dict(place=(PRIME, PRIME)),
    "last of the keys": {},
    "two-sided": dict(causal=False),
    "two-sided, all": dict(causal=False, place=(B + 1, B + 1)),
    **{f"{g} heads a group": dict(heads=(2 * g, 2, WIDTH, WIDTH)) for g in (1, 3, 4)},
    "16 heads a group": dict(heads=(16, 1, WIDTH, WIDTH)),
    "other widths": dict(heads=(3, 1, 24, 40)),
    "long queries": dict(size=8.0),
    "negative scale": dict(scale=-0.7),
    "scale of 0": dict(scale=0.0),
    "cap": dict(soft_cap=1.5),
    "cap, sinks": dict(soft_cap=1.5, sinks=True),
    "sinks, two-sided": dict(sinks=True, causal=False),
    "documents": dict(lengths=DOCUMENTS),
    "documents, two-sided": dict(lengths=DOCUMENTS, causal=False, memory=0),
    "each row at its place": dict(place=(7, 40), starts=(30, 11)),
    "heads before tokens": dict(lie=heads_first),
}
CASES = {
    "compressed": COMMON | {
        "no memory": dict(memory=0),
        "no windows": dict(place=(3, 3), memory=0),
        "windows of a token": dict(compress_block_sliding_stride=1),
        "much memory": dict(memory=70),
        "no memory, two-sided": dict(memory=0, causal=False, place=(B + 1, B + 1)),
    },
    "selected": COMMON | {
        "each head": dict(each=True),
        "each head, two-sided": dict(each=True, causal=False),
        "blocks twice": dict(repeated=True),
        "initial and local": dict(num_initial_blocks=1, num_local_blocks=2),
        "initial alone": dict(num_initial_blocks=2, num_local_blocks=0),
        "initial, two-sided": dict(num_initial_blocks=1, causal=False),
        "no local": dict(num_local_blocks=0, sinks=True),
        "forced alone": dict(n=0, num_initial_blocks=1),
        "nothing": dict(n=0, num_local_blocks=0),
        "blocks of 12": dict(selection_block_size=12, heads=(12, 1, 16, 16)),
        "blocks wider than a tile": dict(selection_block_size=128, place=(5, 300), n=2),
        "whole blocks": dict(selection_block_size=16, place=(B, 4 * B)),
        "documents, forced": dict(lengths=DOCUMENTS, num_initial_blocks=1, num_local_blocks=2),
        "gates": dict(gated=True, num_initial_blocks=1),
        "gates, each head": dict(gated=True, each=True, heads=(3, 1, WIDTH, WIDTH)),
        "gates, documents": dict(gated=True, lengths=DOCUMENTS, num_local_blocks=0),
        "gates, wide blocks": dict(
            gated=True, selection_block_size=48, heads=(12, 1, 16, 16), place=(5, 137), n=2
        ),
    },
    "window": COMMON | {
        "own key": dict(sliding_window_size=0),
        "own key, two-sided": dict(sliding_window_size=0, causal=False),
        "all keys": dict(sliding_window_size=1000),
        "all keys, documents": dict(sliding_window_size=1000, lengths=DOCUMENTS),
    },
}  # fmt: skip
# eager PyTorch in float32 is the specification
HALVES = [torch.bfloat16, torch.float16]
ROWS = [("eager", dtype) for dtype in HALVES]
ROWS += [("chunked", dtype) for dtype in (torch.float32, torch.bfloat16)]
ROWS += [("flex", torch.float32)]
KERNELS = [("triton", torch.float32)]
if CUDA:
    ROWS += [("flex", torch.bfloat16)]
    KERNELS = [(form, dtype) for form in ("sm90", "portable") for dtype in HALVES]
    KERNELS += [("triton", torch.float32)]
    SIZES = [(16, 16), (32, 32), (64, 64), (80, 80), (192, 128), (256, 256)]
    for cases in CASES.values():
        cases |= {f"widths of {d} and {e}": dict(heads=(6, 2, d, e)) for d, e in SIZES}
        cases |= {f"{h} heads of {k}": dict(heads=(h, k, 128, 128)) for h, k in [(64, 1), (14, 2)]}
        cases["1300 tokens"] = dict(place=(1300, 1300))
GPU_ALONE = {"flex": pytest.mark.gpu} if CUDA else {}


def rows(cases, some, one_of):
    """The cases on each of these backends, and on the kernels, of which some are left out."""
    slow = [pytest.mark.kernels, pytest.mark.slow(one_of=one_of)]
    marked = [(*row, GPU_ALONE.get(row[0], ())) for row in some] + [(*row, slow) for row in KERNELS]
    return [
        pytest.param(
            backend, dtype, branch, case, marks=marks,
            id=f"{backend}-{str(dtype).removeprefix('torch.')}-{branch}-{case}",
        )
        for backend, dtype, marks in marked
        for branch, named in cases.items()
        for case in named
    ]  # fmt: skip


def check_right(backend, dtype, call, given, specification=None):
    """The budget of errors; or that flex_attention says what it lacks."""
    narrow = CUDA and min(given.get("heads", HEADS)[2:]) < 16
    lacks = {"starts", "gated"} & given.keys() or given.get("use_diff_topk") or narrow
    if backend == "flex" and lacks:
        with pytest.raises(NotImplementedError, match="flex"):
            call("flex")
        return
    op = functools.partial(call.op, **call.settings)
    gradients = CUDA or backend != "flex"
    assert_right(op, call.tensors, dtype, backend, specification, gradients)


@pytest.mark.parametrize("backend, dtype, branch, case", rows(CASES, ROWS, 6))
def test_branches(backend, dtype, branch, case, untraced_flex):
    given = CASES[branch][case]
    check_right(backend, dtype, draw(branch, dtype, **given), given)


PAPER = dict(importance="probs", num_initial_blocks=1, num_local_blocks=2)
TOKENS = dict(importance="max", compress_block_size=1, compress_block_sliding_stride=1)
# groups of 16 tokens
STAGES = sizes(4, 4, 4, importance="max", num_local_blocks=4, num_selected_groups=1)
# the first tokens share the ranking of a token before them: forced, repeated and future blocks too
GROUPS = dict(selection_stride=4, place=(PLACE[0], PLACE[1] - 3))
LEADERS = [[[0, -1]], [[1, 1]]]
BOTH = {
    "one block and a token": dict(place=(B + 1, B + 1)),
    "1 token": dict(place=(1, 1)),
    "logits": {},
    "probs": dict(importance="probs"),
    "largest": dict(importance="max"),
    "largest of 3 heads": dict(importance="head_max", heads=(6, 2, WIDTH, WIDTH)),
    "interpolated": dict(interpolated_importance_score=True),
    "each head": dict(each=True, importance="max", heads=(3, 1, WIDTH, WIDTH)),
    "two-sided": dict(causal=False, num_initial_blocks=1),
    "groups of tokens": GROUPS | dict(leaders=LEADERS),
    "groups of tokens, each head": GROUPS | dict(leaders=[2, 999], each=True),
    "no local block": dict(num_local_blocks=0),
    "cap, sinks": dict(sinks=True, soft_cap=1.5),
    "more than there are": dict(num_selected_blocks=20),
    "documents": dict(lengths=DOCUMENTS, num_initial_blocks=1),
    "gates": dict(use_diff_topk=True),
    "gates, groups of tokens": dict(
        use_diff_topk=True, selection_stride=4, place=(B + 4, B + 4), importance="max"
    ),
    "windows longer than blocks": sizes(2 * S, 2 * S),
}
LAYERS = {
    "layer": BOTH | {
        "nothing selected": dict(num_selected_blocks=0),
        "paper": PAPER,
        "paper, two-sided": PAPER | dict(causal=False),
        "probs, documents, two-sided": PAPER | dict(lengths=DOCUMENTS, causal=False),
        "interpolated, documents, two-sided": dict(
            interpolated_importance_score=True, lengths=DOCUMENTS, causal=False
        ),
        "16 heads a group": dict(heads=(16, 1, WIDTH, WIDTH)),
        "1 head a group": dict(heads=(2, 2, WIDTH, WIDTH)),
        "no memory": dict(memory=0),
        "no memory, values of the window": dict(memory=0, window="v"),
        "all of its own, computed again": dict(window="kv", raw=True, recompute=True),
        "narrow window": dict(sliding_window_size=3, **PAPER),
        "wide window": dict(PAPER, sliding_window_size=2 * S, recompute=True),
        "wide window, documents": dict(PAPER, sliding_window_size=2 * S, lengths=DOCUMENTS),
        "a ranking a block": dict(
            selection_block_size=16, selection_stride=16, place=(56, 56), heads=(2, 1, 8, 5)
        ),
        "probs, gates, sinks": dict(
            use_diff_topk=True, importance="probs", sinks=True, soft_cap=1.5
        ),
        "gates, documents": dict(use_diff_topk=True, importance="probs", lengths=DOCUMENTS),
        "heads before tokens": dict(lie=heads_first),
    },
    "one softmax": BOTH | {
        "tokens": TOKENS,
        "tokens, documents": TOKENS | dict(lengths=DOCUMENTS),
        "two-sided documents, each head counts": dict(
            importance="head_max", lengths=DOCUMENTS, causal=False
        ),
        "tokens, each head counts": TOKENS | dict(importance="head_max", lengths=DOCUMENTS),
        "8 bits": TOKENS | dict(ranking_bits=8),
        "8 bits, each head counts": TOKENS | dict(
            ranking_bits=8, importance="head_max", heads=(6, 2, WIDTH, WIDTH)
        ),
        "two stages": STAGES | dict(place=(48, 96)),
        "two stages, documents": STAGES | dict(lengths=[29, 0, 40]),
        "two stages, each head counts": STAGES | dict(
            importance="head_max", lengths=[29, 0, 40], heads=(6, 1, WIDTH, WIDTH)
        ),
        "forced": dict(num_initial_blocks=1, num_local_blocks=2),
        "raw": dict(raw=True),
        "dense at first": dict(dense_length=12),
        "dense": dict(dense_length=1000),
        "each row at its place": dict(place=(17, 40), starts=(3, 21)),
    },
}  # fmt: skip
LAYER_ROWS = [("chunked", torch.float32)] + [("flex", torch.float32)] * CUDA
if CUDA:
    # local blocks in the window's launch, and not
    LAYERS["layer"] |= {
        f"window of {w} over local blocks, {heads}": dict(
            num_initial_blocks=1, num_local_blocks=2, sliding_window_size=w, memory=0, heads=heads,
            place=(900, 900),
        )
        for w in (63, 255)
        for heads in [(16, 1, 64, 64), (32, 8, 64, 64)]
    }  # fmt: skip
    for name in ("layer", "one softmax"):
        LAYERS[name] |= {
            f"640 tokens, {g} heads a group, {stride} tokens a ranking": dict(
                heads=(2 * g, 2, 128, 128), place=(640, 640), selection_stride=stride
            )
            for g in (1, 2, 3, 4, 5, 6, 7, 12, 32)
            for stride in (1, 4)
        }
        LAYERS[name] |= {
            f"windows {l} by {d}, {n} blocks of {s}, {heads}": sizes(
                l, d, s, n=n, heads=heads, place=(200, 3 * s * n // 2 + 37),
            )
            for l, d, s, n in [(16, 8, 32, 40), (32, 32, 64, 32), (64, 32, 128, 6)]
            for heads in [(16, 1, 128, 128), (4, 2, 80, 96)]
        }  # fmt: skip


@pytest.mark.parametrize("backend, dtype, branch, case", rows(LAYERS, LAYER_ROWS, 8))
def test_layers(backend, dtype, branch, case, untraced_flex):
    given, specification = LAYERS[branch][case], None
    call = draw(branch, dtype, **given)
    if dtype in HALVES:
        if {"use_diff_topk", "dense_length", "starts"} & given.keys():
            pytest.skip("of half precision the selection is given, the rest is held in float32")
        with torch.no_grad(), running(backend) as name:  # near-ties may fall either way
            _, block_indices = call(name, return_block_indices=True)
        specification = under_selection(call, block_indices)
    check_right(backend, dtype, call, given, specification)


# the ranking: the chosen blocks are the best by the scores of the specification in fp64, except
# where two lie nearer than rounding

GEOMETRIES = [(8, 4, 8), (5, 2, 8), (8, 8, 4), (12, 6, 2), (4, 4, 4), (40, 4, 16), (2, 1, 16)]
GEOMETRIES += [(8, 4, 4), (12, 4, 4), (8, 4, 16), (12, 4, 12)]
SELECTIONS = {
    **{f"windows {l} by {d}, blocks of {s}": sizes(l, d, s) for l, d, s in GEOMETRIES},
    "two-sided, each head": dict(causal=False, each=True, num_local_blocks=2),
    "1 token": dict(place=(1, 1)),
    "a block": dict(place=(8, 8)),
    "a block and a token": dict(place=(9, 9), num_initial_blocks=0),
    "many windows": dict(place=(3, 600), heads=(2, 1, 16)),
    "many windows, two-sided": dict(place=(3, 600), causal=False),
    "one head": dict(heads=(2, 2, 16)),
    "7 heads": dict(heads=(7, 1, 40), memory=0),
    "12 heads": dict(heads=(12, 1, 16), each=True, memory=5),
    "1 slot": dict(num_selected_blocks=1),
    "17 slots": dict(num_selected_blocks=17, place=(3, 150), num_initial_blocks=0),
    "forced blocks": dict(num_initial_blocks=2, num_local_blocks=3),
    "no forced blocks": dict(num_initial_blocks=0, num_local_blocks=0),
    "groups of tokens": dict(selection_stride=2, place=(27, 61 - 61 % 2 + 27 % 2)),
    "each row at its place": dict(place=(13, 80), starts=(60, 5)),
    "past the last window": dict(place=(13, 32), starts=(60, 5)),
    "negative scale": dict(scale=-0.3),
}
if CUDA:
    WIDE = [(4, 4, 64), (6, 2, 128), (16, 1, 80), (5, 1, 40), (64, 4, 128), (64, 1, 32)]
    WIDE += [(3, 1, 256)]
    SELECTIONS |= {f"heads of {heads}": dict(heads=heads, place=(131, 1031)) for heads in WIDE}
    # thousands of tiles, among which some lists overflow
    SELECTIONS |= {
        f"{n} slots of {heads}": dict(
            num_selected_blocks=n, place=(8192, 32768), heads=heads, memory=1,
            **sizes(32, 16, 64),
        )
        for n in (13, 16, 33, 64)
        for heads in ((16, 1, 128), (4, 4, 64))
    }  # fmt: skip


@pytest.mark.parametrize("rule", selections.RULES)
@pytest.mark.parametrize("case", SELECTIONS)
@pytest.mark.parametrize(
    "backend",
    ["chunked", pytest.param("triton", marks=[pytest.mark.kernels, pytest.mark.slow(one_of=6)])],
)
def test_selection(backend, case, rule):
    settings = dict(place=(27, 61), heads=(3, 1, 16), memory=2) | SELECTIONS[case]
    (T, N), heads, m = (settings.pop(name) for name in ("place", "heads", "memory"))
    causal, starts = settings.get("causal", True), settings.pop("starts", None)
    settings["query_heads_share_selected_kv"] = not settings.pop("each", False)
    d = settings.get("compress_block_sliding_stride", 4)
    q, ck, mem_k = selections.draw(T, N, *heads, d=d, causal=causal, m=m, B=2 if T < 1000 else 1)
    offset = None if starts is None else torch.tensor(starts, device=DEVICE)
    if rule == "logits" and case == "negative scale":  # products of any size
        q, ck = 1e4 * q.float(), 1e-30 * ck.float()
        mem_k = mem_k.float()
    selections.assert_right(
        q, ck, mem_k, N, q_offset=offset, backend=backend, **settings, **selections.RULES[rule]
    )
