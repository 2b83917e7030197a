"""A paged cache keeps the laws of any other, and its pages."""

import copy
import re

import pytest
import torch

from native_sparse_attention import KVCache, PagedKVCache, Transformer
from tests.helpers.layers import DIM, SETTINGS, layer


def normal(*shape):
    return torch.randn(*shape, dtype=torch.float64)


def close(actual, expected):
    torch.testing.assert_close(actual, expected, atol=1e-12, rtol=1e-12)


def paged(**sizes):
    return PagedKVCache(**(dict(page_size=8, num_pages=40, batch=2, max_length=64) | sizes))


def everything(cache):
    """What a cache holds, to compare."""
    state = copy.deepcopy(vars(cache))
    tensors = {
        (group, name): tensor
        for group in ("_streams", "_tail", "_known")
        for name, tensor in state.pop(group).items()
    }
    return state, tensors


def assert_unchanged(cache, before):
    now = everything(cache)
    assert now[0] == before[0] and now[1].keys() == before[1].keys()
    assert all(torch.equal(now[1][name], before[1][name]) for name in now[1])


def assert_pages_are_owned_once(cache):
    """Every page is free or one row's, and the page table says whose."""
    owned = [page for pages in cache._pages for page in pages]
    assert sorted(owned + cache._free) == list(range(cache.num_pages))
    assert cache.free_pages == len(cache._free)
    for row, pages in zip(cache.page_table.tolist(), cache._pages, strict=True):
        assert row == pages + [0] * (len(row) - len(pages))
    for pages, length in zip(cache._pages, cache.lengths):
        assert len(pages) * cache.page_size >= length


LAWS = [
    "default",
    "paper",
    "independent",
    "shared rankings",
    "window of windows",
    "no memory",
    "own rankings",
]


@pytest.mark.parametrize(
    "chunks", [[43], [17, 26], [5, 1, 0, 13, 2, 8, 14], [38, *[1] * 5]], ids=str
)
@pytest.mark.parametrize("setting", LAWS)
def test_chunks_are_one_forward(setting, chunks):
    module, cache = layer(**SETTINGS[setting]), paged()
    x = normal(2, 43, DIM)
    expected = module(x)
    outs = [module(part, cache=cache) for part in x.split(chunks, dim=1)]
    close(torch.cat(outs, dim=1), expected)
    assert cache.lengths == [43, 43] and cache.free_pages == 40 - 12
    assert_pages_are_owned_once(cache)


@pytest.mark.parametrize("page_size", [8, 24])
@pytest.mark.parametrize("setting", LAWS)
def test_rows_of_different_lengths(setting, page_size):
    """Rows grow by turns, so that the pages of one lie between those of others, and out of
    order."""
    module = layer(**SETTINGS[setting])
    x = normal(3, 30, DIM)
    expected = module(x)
    cache = paged(batch=3, max_length=30, page_size=page_size, num_pages=12)
    cache._free = torch.randperm(12).tolist()
    done = [0, 0, 0]
    for lengths in ([13, 4, 0], [2, 9, 3], [1, 1, 1], [0, 5, 8], [6, 0, 1], [3, 3, 3], [5, 8, 14]):
        inp = normal(3, max(lengths), DIM)
        for row, n in enumerate(lengths):
            inp[row, :n] = x[row, done[row] : done[row] + n]
        with torch.no_grad():
            out = module(inp, cache=cache, lengths=lengths)
        for row, n in enumerate(lengths):
            close(out[row, :n], expected[row, done[row] : done[row] + n])
            assert (out[row, n:] == 0).all()
            done[row] += n
        assert_pages_are_owned_once(cache)
    assert cache.lengths == [30, 30, 30]
    assert any(pages != sorted(pages) for pages in cache._pages)


@pytest.mark.parametrize("make", [KVCache, paged])
@pytest.mark.parametrize("setting", ["default", "shared rankings", "independent"])
def test_rows_finish_and_others_start_in_their_place(setting, make):
    """Continuous batching: what one row does leaves no trace in another, not even NaN."""
    module = layer(**SETTINGS[setting])
    first, second = normal(2, 40, DIM), normal(1, 40, DIM)
    cache = make(batch=2, max_length=64)
    with torch.no_grad():
        expected, later = module(first), module(second)
        module(first[:, :21], cache=cache)
        if make is paged:
            taken = list(cache._pages[0])
            for store in cache._streams.values():
                store[taken] = float("nan")
        cache.reset([0])
        assert cache.lengths == [0, 21]
        for start, n in ((0, 9), (9, 1), (10, 6)):
            inp = torch.cat((second[:, start : start + n], first[1:, 21 + start : 21 + start + n]))
            out = module(inp, cache=cache)
            close(out[0], later[0, start : start + n])
            close(out[1], expected[1, 21 + start : 21 + start + n])
    if make is paged:
        assert set(cache._pages[0]) <= set(taken)
        assert_pages_are_owned_once(cache)


@pytest.mark.parametrize("setting", ["default", "shared rankings"])
def test_truncate(setting):
    module, cache = layer(**SETTINGS[setting]), paged()
    x, other = normal(2, 40, DIM), normal(2, 40, DIM)
    with torch.no_grad():
        expected = module(x)
        module(torch.cat((x[:, :21], other[:, :14]), dim=1), cache=cache)
        cache.truncate(21)
        assert cache.free_pages == 40 - 6
        close(module(x[:, 21:35], cache=cache), expected[:, 21:35])
        cache.truncate(torch.tensor([30, 23]))
        assert [len(pages) for pages in cache._pages] == [4, 3]
        assert_pages_are_owned_once(cache)
        step = torch.stack((x[0, 30:34], x[1, 23:27]))
        out = module(step, cache=cache)
        close(out[0], expected[0, 30:34])
        close(out[1], expected[1, 23:27])
        cache.reset()
        assert cache.free_pages == 40 and not cache.page_table.any()
        close(module(x, cache=cache), expected)


@pytest.mark.parametrize("beams", [[2, 0, 1], [2, 0, 0, 1], [1, 1, 1], [0], [0, 2, 2]], ids=str)
@pytest.mark.parametrize("setting", ["default", "shared rankings"])
def test_reorder(setting, beams):
    module, cache = layer(**SETTINGS[setting]), paged(batch=3, num_pages=20)
    x, held = normal(3, 30, DIM), [22, 13, 7]
    with torch.no_grad():
        expected = module(x)
        module(x[:, :22], cache=cache, lengths=held)
        table = cache.page_table
        cache.reorder(torch.tensor(beams))
        assert cache.lengths == [held[r] for r in beams]
        assert (cache.page_table is table) == (len(beams) == 3)
        assert_pages_are_owned_once(cache)
        step = torch.stack([x[r, held[r] : held[r] + 5] for r in beams])
        # a row that goes on differently is no concern of its copies
        step[0] += 1
        out = module(step, cache=cache)
        for row, r in list(enumerate(beams))[1:]:
            close(out[row], expected[r, held[r] : held[r] + 5])
        assert_pages_are_owned_once(cache)


def test_a_row_goes_to_its_first_copy_without_a_page_copied():
    module, cache = layer(), paged()
    with torch.no_grad():
        module(normal(2, 9, DIM), cache=cache)
    stores, pages = {name: t.data_ptr() for name, t in cache._streams.items()}, cache._pages
    cache.reorder([1, 0])
    assert cache._pages == pages[::-1] and cache.free_pages == 36
    cache.reorder([1, 1])
    assert cache._pages[0] == pages[0] and cache.free_pages == 36
    assert {name: t.data_ptr() for name, t in cache._streams.items()} == stores


def test_clone():
    module, cache = layer(), paged()
    x = normal(2, 40, DIM)
    with torch.no_grad():
        expected = module(x)
        module(x[:, :20], cache=cache)
        cache.lengths_on("cpu")
        before = everything(cache)
        other = cache.clone()
        close(module(x[:, 20:], cache=other), expected[:, 20:])
        other.reset()
        assert_unchanged(cache, before)
        close(module(x[:, 20:], cache=cache), expected[:, 20:])


def test_gradients_of_a_cached_call():
    module = layer()
    x = normal(2, 25, DIM)
    for lengths in ([16, 16], [16, 11]):
        caches = KVCache(), paged()
        grads = []
        for cache in caches:
            module(x[:, :16], cache=cache, lengths=lengths)
            leaf = x[:, 16:].clone().requires_grad_()
            (grad,) = torch.autograd.grad(module(leaf, cache=cache).square().sum(), leaf)
            grads.append(grad)
        close(*grads)


def test_inference_mode_leaves_a_cache_for_all():
    module, cache = layer(), paged()
    x = normal(2, 25, DIM)
    expected = module(x)
    with torch.inference_mode():
        module(x[:, :16], cache=cache)
        cache.lengths_on("cpu")
        cache.reorder([0, 1, 0])
        cache.reorder([1, 0, 0])
    out = module(x[[1, 0, 0], 16:], cache=cache)
    close(out, expected[[1, 0, 0], 16:])
    out.sum().backward()
    with torch.inference_mode():
        cache.reset([1])
        module(x[[1, 0, 0], :1], cache=cache)


def test_out_of_pages_raises_before_anything_is_written():
    module, cache = layer(), paged(num_pages=5)
    x = normal(2, 30, DIM)
    with torch.no_grad():
        module(x[:, :11], cache=cache)
        cache.lengths_on("cpu")
        before = everything(cache)
        entries = {name: normal(2, 2, 0, 8) for name in ("k", "v")}
        for call, message in [
            (lambda: module(x[:, 11:17], cache=cache), "2 pages needed, 1 of num_pages=5 free"),
            (lambda: module(x, cache=cache, lengths=[6, 30]), "5 pages needed, 1 of"),
            (lambda: cache.reserve(entries, [6, 6]), "2 pages needed, 1 of"),
            (lambda: cache.reserve(entries, [0, 54]), "row 1 holds 11 of max_length=64 tokens, 54"),
            (lambda: cache.new_tokens(x[:, :6], None), "2 pages needed, 1 of"),
            (lambda: cache.reorder([0, 0, 0]), "4 pages needed, 3 of"),
        ]:
            with pytest.raises(ValueError, match=re.escape(f"cache is full: {message}")):
                call()
            assert_unchanged(cache, before)
        # what one row gives back, another takes
        cache.reset([1])
        close(module(x[:, :19], cache=cache, lengths=[0, 19])[1], module(x)[1, :19])


def test_a_step_moves_nothing():
    """A captured graph finds storage, page table and lengths where they were."""
    module, cache = layer(), paged()
    seen = set()
    with torch.no_grad():
        for _ in range(20):
            module(normal(2, 1, DIM), cache=cache)
            cache.lengths_on("cpu")
            seen.add(tuple(tensor.data_ptr() for tensor in cache.tensors().values()))
    assert len(seen) == 1


@pytest.mark.parametrize("make", [KVCache, paged])
def test_lengths_on_follows(make):
    module, cache = layer(), make(batch=2)
    x = normal(2, 9, DIM)
    held = cache.lengths_on("cpu")
    where = held.data_ptr()
    steps = [
        (lambda: module(x, cache=cache), [9, 9]),
        (lambda: module(x, cache=cache, lengths=[4, 0]), [13, 9]),
        (lambda: cache.truncate(8), [8, 8]),
        (lambda: cache.truncate([5, 7]), [5, 7]),
        (lambda: cache.reorder([1, 0]), [7, 5]),
        (lambda: cache.reorder([1, 1]), [5, 5]),
        (lambda: cache.reset([0]), [0, 5]),
        (lambda: cache.advance([2, 1]), [2, 6]),
        (lambda: cache.to("cpu"), [2, 6]),
        (lambda: cache.reset(), [0, 0]),
    ]
    with torch.no_grad():
        for step, expected in steps:
            step()
            now = cache.lengths_on(torch.device("cpu"))
            assert now is held and now.data_ptr() == where and now.dtype == torch.int32
            assert now.tolist() == cache.lengths == expected
        # the host counts, whoever wrote the entries adds to the tensor
        cache.count([1, 0])
        assert cache.lengths == [1, 0] and held.tolist() == [0, 0]
        held += torch.tensor([1, 0])
        copied = cache.clone()
        cache.advance([0, 1])
        assert copied.lengths_on("cpu").tolist() == copied.lengths == [1, 0]
        cache.reorder([1, 0, 1])
        assert cache.lengths_on("cpu").tolist() == cache.lengths == [1, 1, 1]


def test_pages_hold_whole_blocks_and_windows():
    x = normal(2, 10, DIM)
    with pytest.raises(ValueError, match=r"page_size must be a multiple of .* of 8, got 12"):
        layer()(x, cache=paged(page_size=12))
    with pytest.raises(ValueError, match=r"page_size must be a multiple of .* of 8, got 4"):
        layer(**SETTINGS["window of windows"])(x, cache=paged(page_size=4))
    cache = paged(page_size=12)
    with pytest.raises(ValueError, match="page_size must be a multiple of every=8, got 12"):
        cache.reserve({"ck": normal(2, 2, 0, 8)}, [1, 1], every=8)
    cache.reserve({"ck": normal(2, 2, 0, 8)}, [1, 1], every=4)
    with pytest.raises(ValueError, match="cache holds 3 entries of ck a page, not 6"):
        cache.reserve({"ck": normal(2, 2, 0, 8)}, [1, 1], every=2)


@pytest.mark.parametrize("name", ["page_size", "num_pages", "batch", "max_length"])
@pytest.mark.parametrize("value", [0, None, 1.5])
def test_bad_constructor(name, value):
    with pytest.raises(ValueError, match=f"{name} must be an integer of at least 1, got {value}"):
        paged(**{name: value})


@pytest.mark.parametrize("use_sparse_attn", [True, False])
def test_transformer(use_sparse_attn):
    net = Transformer(
        num_tokens=32, dim=16, depth=2, dim_head=8, heads=2, use_sparse_attn=use_sparse_attn
    )
    ids = torch.randint(0, 32, (2, 30))
    cache = net.new_cache(max_length=40, batch=2, page_size=8, num_pages=9)
    assert [type(held) for held in cache] == [PagedKVCache] * 2
    with torch.no_grad():
        parts = [net(part, cache=cache) for part in ids.split([11, 1, 18], dim=1)]
        torch.testing.assert_close(torch.cat(parts, dim=1), net(ids), atol=1e-5, rtol=1e-5)
    assert "PagedKVCache(lengths=[30, 30], max_length=40, nbytes=" in repr(cache[0])
    assert [held.batch for held in net.new_cache(batch=3)] == [3, 3]
    with pytest.raises(ValueError, match="page_size must be an integer of at least 1, got None"):
        net.new_cache(max_length=40, batch=2, num_pages=9)
    with pytest.raises(ValueError, match="batch must be an integer of at least 1, got None"):
        net.new_cache(max_length=40, page_size=8, num_pages=9)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype feature")
@pytest.mark.parametrize("make", [KVCache, paged])
def test_a_step_of_a_graph_waits_for_nothing(waits_for_nothing, make):
    """The host counts, makes room and tells the device of it without once waiting for it; a graph
    reads lengths and page table where they always were."""
    module, cache = layer(backend="eager").cuda(), make(batch=2, max_length=64)
    new = {name: torch.zeros(2, 2, 0, 8, dtype=torch.float64, device="cuda") for name in ("k", "v")}
    with torch.no_grad():
        module(normal(2, 10, DIM).cuda(), cache=cache)
    held, ones = cache.lengths_on("cuda"), torch.ones(2, dtype=torch.int32, device="cuda")
    rows, seen = torch.arange(2, device="cuda"), torch.zeros_like(held)

    def step():
        held.add_(ones)
        if cache.page_table is not None:
            seen.copy_(cache.page_table[rows, (held - 1).long() // 8])

    step()
    cache.advance([0, 0])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    with waits_for_nothing():
        for _ in range(20):
            cache.reserve(new, [1, 1])
            cache.reserve({"ck": new["k"]}, [1, 1], every=4)
            cache.ring(new, 7)
            graph.replay()
            cache.count([1, 1])
        cache.reset([1])
        cache.reserve(new, [1, 9])
        cache.advance([1, 9])
        cache.reorder([1, 0])
        cache.truncate([8, 31])
    assert held.tolist() == cache.lengths == [8, 31]
    if make is paged:
        assert seen.tolist() == [6, 7]
        assert_pages_are_owned_once(cache)
