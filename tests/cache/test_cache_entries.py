"""Entries of either cache: written by hand to their addresses, room for them, what they take; bad
input."""

import re

import pytest
import torch

from native_sparse_attention import KVCache
from tests.cache.test_paged_cache import assert_unchanged, close, everything, normal, paged
from tests.helpers.layers import DIM, SETTINGS, layer


def write_by_hand(cache, source, streams, tails, counts, d):
    """What a decode kernel does: write entries [b h n d] of a KVCache to the storage of another,
    by their addresses, and count them."""
    tokens = {name: streams[name] for name in streams if name not in ("ck", "cv")}
    windows = {name: streams[name] for name in ("ck", "cv")}
    for entries, every in ((tokens, 1), (windows, d)):
        for name, store in cache.reserve(entries, counts, every).items():
            for row, n in enumerate(counts):
                for place in range(n // every):
                    slots = store.shape[2]
                    page, slot = row, place
                    if cache.page_size is not None:
                        assert slots == cache.page_size // every
                        page, slot = cache.page_table[row, place // slots], place % slots
                    store[page, :, slot] = entries[name][row, :, place]
    for name, length in tails.items():
        (store,) = cache.ring({name: source._tail[name][:, :, :0]}, length).values()
        assert store.shape == source._tail[name].shape
        store.copy_(source._tail[name])
    cache.lengths_on("cpu").add_(torch.tensor(counts))
    cache.count(counts)


@pytest.mark.parametrize("make", [KVCache, paged])
@pytest.mark.parametrize("setting", ["default", "shared rankings", "independent"])
def test_entries_written_by_their_addresses(setting, make):
    module = layer(**SETTINGS[setting])
    x, counts = normal(2, 40, DIM), [29, 17]
    source, cache = KVCache(), make(batch=2)
    if make is paged:
        cache._free = torch.randperm(40).tolist()
    with torch.no_grad():
        expected = module(x)
        module(x[:, :29], cache=source, lengths=counts)
        tails = {name: 1 if name == "ranking" else 7 for name in source._tail}
        write_by_hand(cache, source, source._streams, tails, counts, 4)
        assert cache.lengths_on("cpu").tolist() == cache.lengths == counts
        out = module(torch.stack((x[0, 29:40], x[1, 17:28])), cache=cache)
    close(out[0], expected[0, 29:40])
    close(out[1], expected[1, 17:28])


@pytest.mark.parametrize("make", [KVCache, paged])
def test_reserve_and_ring_write_nothing(make):
    module, cache = layer(), make(batch=2, max_length=32)
    with torch.no_grad():
        module(normal(2, 10, DIM), cache=cache)
    before = everything(cache)
    one = {name: normal(2, 2, 1, 8) for name in ("k", "v")}
    stores = cache.reserve(one, [1, 6])
    assert stores["k"] is cache._streams["k"] and list(stores) == ["k", "v"]
    assert cache.ring(one, 7)["v"] is cache._tail["v"]
    assert_unchanged(cache, before)
    held = {name: t.clone() for name, t in cache._streams.items()}
    summaries = {name: normal(2, 2, 0, 8) for name in ("ck", "cv")}
    cache.reserve(one, [7, 22])
    cache.reserve(summaries, [7, 22], every=4)
    assert cache.lengths == [10, 10]
    assert all(torch.equal(cache._streams[name], t) for name, t in held.items())


def test_storage_grows_and_is_made():
    """In a cache without end storage doubles; with an end, and in pages, it is there at once."""
    new, summary = {"k": normal(2, 3, 0, 8)}, {"ck": normal(2, 3, 0, 8).float()}
    cache = KVCache()
    assert cache.reserve(new, [5, 3])["k"].shape == (2, 3, 8, 8)
    assert cache.reserve(summary, [5, 3], every=4)["ck"].shape == (2, 3, 1, 8)
    k = normal(2, 3, 6, 8)
    cache.append({"k": k}, cache.new_tokens(k[:, 0], None))
    cache.count([6, 6])
    before = cache._streams["k"].clone()
    grown = cache.reserve(new, [1, 6])["k"]
    assert grown.shape[2] == 16
    assert torch.equal(grown[:, :, :8], before) and not grown[:, :, 8:].any()
    cache = KVCache(max_length=30)
    assert cache.reserve(new, [0, 0])["k"].shape == (2, 3, 30, 8)
    assert cache.reserve(summary, [0, 0], every=4)["ck"].shape == (2, 3, 7, 8)
    cache = paged()
    assert cache.page_table is None
    assert cache.reserve(new, [0, 0])["k"].shape == (40, 3, 8, 8)
    store = cache.reserve(summary, [9, 0], every=4)["ck"]
    assert store.shape == (40, 3, 2, 8) and store.dtype == torch.float32
    assert cache.page_table.shape == (2, 8) and cache.page_table.dtype == torch.int32
    assert cache.ring(new, 7)["k"].shape == (2, 3, 71, 8)


@pytest.mark.parametrize("make", [KVCache, paged])
def test_memory(make):
    module, cache = layer(selection_stride=4), make(batch=2, max_length=64, rollback=9)
    assert cache.memory() == {} and cache.nbytes == 0
    with torch.no_grad():
        module(normal(2, 10, DIM), cache=cache)
    tokens = 40 * 8 if make is paged else 2 * 64
    expected = {"k": tokens * 2 * 8 * 8, "v": tokens * 2 * 8 * 8}
    expected |= {"ck": tokens // 4 * 2 * 8 * 8, "cv": tokens // 4 * 2 * 8 * 8}
    expected |= {"tail k": 2 * 2 * 16 * 8 * 8, "tail v": 2 * 2 * 16 * 8 * 8}
    expected["tail ranking"] = cache._tail["ranking"].nbytes
    expected |= {"page_table": 2 * 8 * 4} if make is paged else {"lengths": 8}
    assert cache.memory() == expected and cache.nbytes == sum(expected.values())
    cache.lengths_on("cpu")
    assert cache.memory() == expected | {"lengths": 8}


@pytest.mark.parametrize("make", [KVCache, paged])
def test_bad_input_names_itself(make):
    module, cache = layer(), make(batch=2, max_length=64)
    with torch.no_grad():
        module(normal(2, 10, DIM), cache=cache)
    before = everything(cache)
    new, meta = {"k": normal(2, 2, 1, 8)}, {"k": torch.zeros(2, 2, 1, 8, device="meta")}
    for call, message in [
        (lambda: cache.reset([0, 2]), "rows must be between 0 and 1, got 2"),
        (lambda: cache.reset([-1]), "rows must be between 0 and 1, got -1"),
        (lambda: cache.reset([0.5]), "rows must be integers"),
        (lambda: cache.reorder([3]), "rows must be between 0 and 1, got 3"),
        (lambda: cache.count([1]), "counts must be 2 integers of at least 0, got [1]"),
        (lambda: cache.advance([1, -1]), "counts must be 2 integers of at least 0, got [1, -1]"),
        (lambda: cache.reserve(new, [1, 1, 1]), "counts must be 2 integers"),
        (lambda: cache.reserve(new, [1, 1], every=0), "every must be an integer of at least 1"),
        (lambda: cache.reserve({"k": normal(3, 2, 1, 8)}, [1, 1]), "k must have 2 rows, got 3"),
        (
            lambda: cache.reserve({"k": normal(2, 4, 1, 8)}, [1, 1]),
            "cache holds k of 2 heads x 8, got",
        ),
        (lambda: cache.reserve({"k": new["k"].half()}, [1, 1]), "cache holds k in torch.float64"),
        (lambda: cache.reserve(meta, [1, 1]), "cache holds k in torch.float64 on cpu, got"),
        (lambda: cache.reserve({"x": meta["k"]}, [1, 1]), "cache is on cpu, got x on meta"),
        (lambda: cache.ring({"k": new["k"].half()}, 7), "cache holds k in torch.float64"),
        (lambda: cache.ring({"k": normal(1, 2, 1, 8)}, 7), "k must have 2 rows, got 1"),
        (lambda: cache.ring(new, 8), "cache keeps the last 71 of k, not 72"),
        (lambda: cache.lengths_on("meta"), "cache is on cpu, got meta for its lengths"),
        (lambda: KVCache().lengths_on("cpu"), "cache has no rows yet, and no lengths"),
    ]:
        with pytest.raises(ValueError, match=re.escape(message)):
            call()
        assert_unchanged(cache, before)
