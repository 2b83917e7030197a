"""A step of decoding by its own kernels: what eager PyTorch makes of the same cache, and what the
layer makes of whole sequences."""

import copy

import pytest
import torch

from native_sparse_attention import KVCache, PagedKVCache
from native_sparse_attention.kernels.decode import kv_cache
from native_sparse_attention.ops.decode import decode_attention
from tests.helpers import budget
from tests.helpers.budget import CUDA, DEVICE
from tests.helpers.decoder import Decoder
from tests.helpers.layers import CAUSAL, DIM, SETTINGS, layer
from tests.helpers.memory import no_sync
from tests.helpers.processes import python
from tests.helpers.sizes import sizes

kernels = pytest.mark.kernels
SIZES = sizes(8, 4, 8, n=3, w=11)


def problem(
    dtype, T=2, heads=(2, 1, 16, 16), N=64, lengths=(37, 5), memory=2, window=False, page=None,
    sinks=False, index=None, integers=torch.int32, **changed,
):  # fmt: skip
    """Tensors of `decode_attention`, and its other arguments; `index` is heads and width of cq."""
    settings = {**SIZES, **changed}
    B, (H, K, D, E), d = len(lengths), heads, settings["compress_block_sliding_stride"]
    ranks, width = index or (H, D)

    def draw(*shape):
        return torch.randn(shape, device=DEVICE).to(dtype)

    tensors = {
        "k": draw(B, N, K, D), "v": draw(B, N, K, E),
        "ck": draw(B, N // d, K, width), "cv": draw(B, N // d, K, E),
    }  # fmt: skip
    if window:
        tensors |= {"window_k": draw(B, N, K, D), "window_v": draw(B, N, K, E)}
    lengths = torch.tensor(lengths, dtype=integers, device=DEVICE)
    if page:
        tensors = {n: paged(t, page // (d if n in ("ck", "cv") else 1)) for n, t in tensors.items()}
        order = torch.arange(B * (N // page), dtype=torch.int32, device=DEVICE)
        settings["page_table"] = order.flip(0).view(B, -1)
    tensors |= {"q": draw(B, T, H, D), "cq": draw(B, T, ranks, width)}
    branches = len(settings.get("branches", "csw"))
    tensors["branch_gates"] = torch.rand(B, T, H, 3, device=DEVICE).to(dtype)
    if memory:
        tensors |= {"mem_k": draw(K, memory, D), "mem_v": draw(K, memory, E)}
    if sinks:
        settings["sinks"] = torch.randn(branches, H, device=DEVICE)
    if branches == 1:
        read = ("q", "cq", "k", "v", "ck") if settings["num_selected_blocks"] else ("q", "k", "v")
        read = ("q", "k", "v", "ck") if settings.get("num_selected_groups") else read
        tensors = {name: tensors[name] for name in read}
        tensors |= dict.fromkeys(("ck", "cv", "branch_gates")) | tensors
    return tensors, dict(settings, lengths=lengths)


def paged(t, size):
    """Pages [pages, size, K, D] of rows [B, N, K, D], the last first."""
    return t.reshape(-1, size, *t.shape[2:]).flip(0)


def ring(settings, heads, T):
    """Rankings that tokens before may have had: at most one block, the first that is ranked, or in
    two stages group of blocks."""
    groups, lengths = settings.get("num_selected_groups", 0), settings["lengths"]
    ranks, size = heads[settings.get("query_heads_share_selected_kv", True)], 4 if groups else 1
    shape = len(lengths), ranks, max(9, T + 1), groups or settings["num_selected_blocks"]
    first = settings.get("num_initial_blocks", 0) // size
    ranked = lengths // (size * settings["selection_block_size"])
    ranked = ranked - settings.get("num_local_blocks", 1) // size
    rankings = lengths.new_full(shape, -1, dtype=torch.int32)
    rankings[..., :1] = torch.where(ranked >= first, first, -1)[:, None, None, None]
    return rankings


def assert_right(dtype, counts=None, **changed):
    """Within the budget of errors, and with the rankings of the specification."""
    (tensors, settings), rings = problem(dtype, **changed), []
    settings["counts"] = None if counts is None else torch.tensor(counts, device=DEVICE)

    def op(*, backend, **leaves):
        if settings.get("selection_stride", 1) > 1 or settings.get("num_selected_groups"):
            rings.append(ring(settings, changed.get("heads", (2, 1)), tensors["q"].shape[1]))
            leaves["ranking"] = rings[-1]
        return decode_attention(**dict.fromkeys(tensors) | leaves, **settings, backend=backend)

    keys = max(1, int(settings["lengths"].max()) + tensors["q"].shape[1])
    budget.assert_right(op, tensors, dtype, gradients=False, reduced=keys)
    assert not rings or torch.equal(*rings[:2])


ONE = dict(branches=("selected",), memory=0)
STAGES = dict(importance="max", selection_block_size=4, num_local_blocks=4, N=128)
TOKENS = dict(importance="max", compress_block_size=1, compress_block_sliding_stride=1)
BITS = dict(TOKENS, ranking_bits=4, selection_block_size=16, N=160, lengths=(150, 37))
CASES = {
    "plain": {},
    "8 bits": dict(ONE, **TOKENS, ranking_bits=8, query_heads_share_selected_kv=False, scale=-0.3),
    "8 bits, each head counts": dict(ONE, **TOKENS | dict(importance="head_max"), ranking_bits=8),
    "4 bits": dict(ONE, **BITS, query_heads_share_selected_kv=False, scale=-0.3),
    "4 bits, each head counts": dict(ONE, **BITS | dict(importance="head_max"), page=32, T=3),
    "4 bits, sums of an odd width": dict(ONE, **BITS, selection_stride=4, heads=(4, 2, 35, 16)),
    "probs": dict(T=1, importance="probs", query_heads_share_selected_kv=False),
    "interpolated, one head": dict(interpolated_importance_score=True, heads=(1, 1, 16, 16)),
    "own rankings": dict(query_heads_share_selected_kv=False, T=1, lengths=(0, 3)),
    "rankings of groups": dict(selection_stride=4, T=7, counts=(7, 3)),
    "no token leads its group": dict(selection_stride=8, importance="probs", lengths=(33, 3)),
    "window of its own": dict(window=True, heads=(2, 2, 16, 24)),
    "pages, probs, cap, sinks": dict(
        page=8, window=True, T=3, importance="probs", soft_cap=2.0, sinks=True, heads=(4, 2, 16, 16)
    ),
    "no blocks": dict(ONE, num_selected_blocks=0, num_local_blocks=0, num_initial_blocks=0),
    "more forced blocks than there are": dict(num_initial_blocks=2**20, num_local_blocks=2**20),
    "forced blocks": dict(heads=(3, 1, 24, 16), num_initial_blocks=1, num_local_blocks=2),
    "wide window, pages": dict(
        num_initial_blocks=1, num_local_blocks=2, sliding_window_size=29, page=16, counts=(2, 1)
    ),
    "narrow window": dict(sliding_window_size=2, num_local_blocks=3, sinks=True),
    "nothing to select": dict(num_selected_blocks=0, memory=0, T=1),
    "interpolated, d > s": sizes(
        24, 24, 4, N=60, interpolated_importance_score=True, heads=(6, 2, 24, 16),
    ),
    "no local block": dict(num_local_blocks=0, scale=-0.4),
    "a long list": sizes(4, 2, 4, n=20, N=128, lengths=(90,), T=1),
    "more selected than stored": dict(
        num_selected_blocks=40, num_initial_blocks=1, num_local_blocks=2
    ),
    "largest": dict(importance="max", num_selected_blocks=2, sinks=True),
    "each head counts": dict(importance="head_max", T=3, heads=(6, 2, 16, 24)),
    "one softmax, pages, sinks": dict(ONE, page=16, sinks=True, soft_cap=2.0, T=1),
    "one softmax, tokens, pages": dict(ONE, **TOKENS, page=8, T=3, counts=(3, 1)),
    "one softmax, own rankings": dict(
        ONE, **TOKENS, query_heads_share_selected_kv=False, heads=(4, 2, 16, 16), lengths=(0, 3)
    ),
    "one softmax, no leader": dict(ONE, **TOKENS, selection_stride=8, lengths=(33, 3), page=16),
    "one softmax, rankings of groups": dict(
        ONE, **TOKENS, selection_stride=4, T=7, counts=(7, 3), integers=torch.int64
    ),
    "narrow index, pages": dict(
        ONE, **TOKENS, index=(2, 6), heads=(6, 2, 24, 16), page=8, T=3, counts=(3, 1)
    ),
    "wide index, rankings of groups": dict(
        ONE, index=(1, 40), heads=(3, 1, 16, 16), selection_stride=4, T=7, sinks=True
    ),
    "index of each head": dict(
        ONE, index=(2, 40), query_heads_share_selected_kv=False, interpolated_importance_score=True
    ),
    "two stages, pages": dict(
        ONE, **STAGES, num_selected_groups=2, page=8, T=3, counts=(3, 1), sinks=True,
        lengths=(101, 70),
    ),
    "two stages, each head counts": dict(
        ONE, **STAGES | dict(importance="head_max"), num_selected_groups=2, T=3, lengths=(101, 70),
        heads=(6, 2, 24, 16),
    ),
    "one softmax, each head counts": dict(ONE, **TOKENS | dict(importance="head_max"), page=8, T=3),
    "two stages, own rankings": dict(
        ONE, importance="logits", num_local_blocks=4, N=128, num_selected_groups=1, scale=-0.3,
        query_heads_share_selected_kv=False, num_initial_blocks=1, heads=(4, 2, 24, 16),
        lengths=(3, 126), integers=torch.int64,
    ),
    "one softmax, no local block": dict(ONE, num_local_blocks=0, scale=-0.4),
    "one softmax, nothing to select": dict(ONE, num_selected_blocks=0, num_local_blocks=2),
    "one softmax, d > s": sizes(
        12, 12, 4, **ONE, importance="max", N=60, num_initial_blocks=1, num_local_blocks=3,
    ),
}  # fmt: skip


@pytest.mark.parametrize("branches", [("selected",), ("window",)])
def test_pages_without_compressed_keys(branches):
    settings = dict(branches=branches, num_selected_blocks=0)
    tensors, call = problem(torch.float64, lengths=(43, 5), page=16, **settings)
    table = call.pop("page_table")
    rows = {n: tensors[n][table.long()].flatten(1, 2) for n in ("k", "v")}
    expected = decode_attention(**tensors | rows, **call, backend="eager")
    found = decode_attention(**tensors, **call, page_table=table, backend="eager")
    torch.testing.assert_close(found, expected)


# constants of the kernels, by module
ALL_READ = {"read_all.MAX_BLOCKS": 0}
FORMS = {
    "as it comes": {},
    # as where there is much to read: blocks are selected first. Several programs rank those of a
    # token, each some of them, against all in several passes
    "ranked first": ALL_READ | {
        "persistent.RANK_SPLIT_BLOCKS": (4, 64), "persistent.RANK_COMPARED": 8,
        "persistent.RANK_SPLIT_CHUNKS": 2,
    },
    "one program ranks for a token": ALL_READ | {
        "persistent.MAX_RESIDENT": 0, "persistent.MAX_RESIDENT_RANKING": 0,
    },
    "several blocks a program": {"read_all.BLOCK_PROGRAMS": 8},
    # as where rows are many
    "few programs": ALL_READ | {"persistent.TARGET_PROGRAMS": 4},
}  # fmt: skip


@pytest.mark.slow(one_of=12)
@kernels
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("form", FORMS)
def test_kernels(form, case, monkeypatch, forget_plans):
    for name, value in FORMS[form].items():
        monkeypatch.setattr(f"native_sparse_attention.kernels.decode.{name}", value)
    assert_right(torch.float32, **CASES[case])


@kernels
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # of unwritten memory
def test_layouts_that_are_not_contiguous():
    """Rows whose features do not follow each other in memory; one length for all rows, expanded;
    counts and pages that are slices."""
    tensors, settings = problem(torch.float32, lengths=(41, 41), page=32, window=True)
    settings["counts"] = torch.tensor([2, 1], device=DEVICE)
    expected = decode_attention(**tensors, **settings, backend="triton")
    tensors = {name: t.repeat_interleave(2, -1)[..., ::2] for name, t in tensors.items()}
    settings["lengths"] = torch.tensor([41, 9], device=DEVICE)[:1].expand(2)
    settings["counts"] = torch.tensor([2, 2, 1, 2], device=DEVICE)[::2]
    settings["page_table"] = settings["page_table"].repeat_interleave(2, dim=1)[:, ::2]
    assert torch.equal(decode_attention(**tensors, **settings, backend="triton"), expected)


def caches(module, b, length):
    page = module.selection_block_size * module.compress_block_sliding_stride
    pages = -(-length // page)
    return KVCache(length, b), PagedKVCache(page, b * pages, b, length)


WINDOWS = SETTINGS["learned ranking of windows"]
SETTINGS = SETTINGS | {"narrow index": dict(WINDOWS, branches=("selected",), index_heads=1)}
SETTINGS |= {"4 bits": CAUSAL["4 bits"]}
STEPPED = [
    ("shared rankings, probs", "rows"), ("independent", "pages"), ("one softmax", "pages"),
    ("one softmax, tokens", "rows"), ("one softmax, shared rankings", "pages"),
    ("biases and norms", "rows"), ("learned ranking", "rows"), ("narrow index", "pages"),
    ("4 bits", "rows"), ("4 bits", "pages"),
]  # fmt: skip
# run by the operations of each branch
NO_STEPS = (
    "no window branch", "no compressed branch", "window alone", "learned ranking of windows",
)  # fmt: skip
if CUDA:
    STEPPED = [(setting, form) for setting in SETTINGS for form in ("rows", "pages")]


@pytest.mark.slow(one_of=3)
@kernels
@pytest.mark.parametrize("setting, form", STEPPED)
def test_steps_are_one_forward(setting, form, steps):
    """After a prefill, several tokens at once and one by one; rows that take fewer; and a row that
    ends, whose place a new sequence takes."""
    settings = SETTINGS[setting] | (dict(dim_head=16) if CUDA else dict(heads=2, kv_heads=1))
    module = layer(**settings, dtype=torch.float32).to(DEVICE)
    module.scale = 0.9
    exact = copy.deepcopy(module)
    exact.backend, module.backend = "eager", "triton" if CUDA else "eager"
    cache, x = caches(module, 2, 48)[form == "pages"], torch.randn(3, 32, DIM, device=DEVICE)
    decoder = Decoder(exact, x, cache, run=module, rows=2, tol=1e-4 if CUDA else 1e-5)
    decoder.step(19, 17)
    module.backend = "triton"
    for counts in ((3, 2), (1, 1), (0, 1)):
        decoder.step(*counts)
    assert len(steps) == (0 if setting in NO_STEPS else 3)
    decoder.restart(1, 2)
    decoder.step(2)
    assert cache.lengths_on(DEVICE).tolist() == cache.lengths == [25, 2]


@kernels
def test_steps_that_are_none(steps):
    """With gradients, with more tokens than the kernels take, by another backend, or under a mask
    of flex_attention."""
    module = layer(dtype=torch.float32, dim_head=16).to(DEVICE)  # flex takes 16 on GPUs
    x = torch.randn(1, 40, DIM, device=DEVICE)
    module(x[:, :2], cache=KVCache(64, 1))
    with torch.no_grad():
        cache = KVCache(64, 1)
        module(x[:, :17], cache=cache)
        module(x[:, :1], cache=cache, disable_triton_kernel=True)
        module(x[:, :1], cache=KVCache(64, 1, rollback=0))
        module.backend = "triton"
        with pytest.raises(ZeroDivisionError):
            module(x[:, :1], cache=cache, fine_selection_flex_mask=lambda *args, **kwargs: 1 // 0)
        assert not steps
        module(x[:, :1], cache=cache)
        assert len(steps) == 1


def test_what_kernels_refuse():
    """Values that no step may have: checks/test_arguments.py."""
    tensors, settings = problem(torch.float32)
    with pytest.raises(NotImplementedError, match="17 new tokens in each row, at most 16"):
        many = {n: tensors[n].repeat(1, 9, 1, 1)[:, :17] for n in ("q", "cq", "branch_gates")}
        decode_attention(**{**tensors, **many, **settings}, backend="triton")
    wide, index = problem(torch.float32, index=(1, 257), **ONE)
    with pytest.raises(NotImplementedError, match="queries that rank are 257 wide, at most 256"):
        decode_attention(**wide, **index, backend="triton")
    with pytest.raises(ValueError, match="cq must have K=1 or H=2 heads, got 3"):
        decode_attention(**wide | dict(cq=wide["cq"].expand(-1, -1, 3, -1)), **index)
    with pytest.raises(NotImplementedError, match="its kernels have no gradients"):
        tensors["q"].requires_grad_()
        decode_attention(**tensors, **settings, backend="triton")


@pytest.mark.gpu
def test_a_step_waits_for_nothing():
    module = layer(dim_head=16, dtype=torch.float32).cuda()
    x = torch.randn(2, 60, DIM, device="cuda")
    for cache in caches(module, 2, 96):
        with torch.no_grad():
            module(x[:, :30], cache=cache)
            module(x[:, 30:36], cache=cache)
            with no_sync():
                for i in range(36, 60):
                    module(x[:, i : i + 1], cache=cache)


# lengths of a fixed cache in a compiled step, which a GPU checks as it reads them

HELD = [3, 0, 8, 5] * 50  # more than one program
TOO_MANY = {
    "full": ([*HELD[:199], 9], None),
    "more than there are": ([0, 0], [2, 5]),
    "negative": ([5, 5], [2, -1]),
}


def cache_starts(lengths, counts):
    counts = None if counts is None else torch.tensor(counts, device=DEVICE)
    return kv_cache.starts(torch.tensor(lengths, device=DEVICE).int(), counts, 4, 12)


@kernels
@pytest.mark.parametrize("counts", [None, [4, 0, 4, 1] * 50])
def test_lengths_of_new_tokens_that_fit(counts):
    int64 = cache_starts(HELD, counts)
    assert int64.dtype == torch.int64 and int64.tolist() == HELD


@kernels
@pytest.mark.gpu
@pytest.mark.parametrize("case", TOO_MANY)
def test_tokens_that_do_not_fit(case):
    """A process cannot go on after an assertion."""
    code = "import torch; from tests.kernels.decode.test_decode import TOO_MANY, cache_starts; "
    code += f"cache_starts(*TOO_MANY[{case!r}]); torch.cuda.synchronize()"
    done = python("-c", code)
    assert done.returncode != 0
    assert "cache is full, or lengths are not between 0 and n" in done.stderr
