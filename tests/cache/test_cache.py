"""Prefill in any chunks and decoding are one forward, for every setting; and what a cache can
do."""

import re

import pytest
import torch
import torch.nn.functional as F

from native_sparse_attention import KVCache
from tests.helpers.layers import DIM, SETTINGS, layer


def normal(*shape):
    return torch.randn(*shape, dtype=torch.float64)


def close(actual, expected):
    torch.testing.assert_close(actual, expected, atol=1e-12, rtol=1e-12)


CHUNKS = [
    [1] * 43,
    [43],
    [17, 26],
    [5, 1, 0, 13, 2, 8, 14],
    [40, 1, 1, 1],
]


@pytest.mark.slow(one_of=8)
@pytest.mark.parametrize("chunks", CHUNKS, ids=str)
@pytest.mark.parametrize("setting", SETTINGS)
def test_chunks_are_one_forward(setting, chunks):
    module = layer(**SETTINGS[setting])
    x = normal(2, 43, DIM)
    expected = module(x)
    cache = None
    outs = []
    for part in x.split(chunks, dim=1):
        out, cache = module(part, cache=cache, return_cache=True)
        outs.append(out)
    close(torch.cat(outs, dim=1), expected)
    assert len(cache) == 43 and cache.is_uniform


@pytest.mark.slow(one_of=3)
@pytest.mark.parametrize("max_length", [None, 30])
@pytest.mark.parametrize("setting", SETTINGS)
def test_rows_of_different_lengths(setting, max_length):
    """Each row goes on where it is, whatever the others do, padding or none."""
    module = layer(**SETTINGS[setting])
    x = normal(3, 30, DIM)
    expected = module(x)
    cache = KVCache(max_length=max_length)
    done = [0, 0, 0]
    for lengths in ([13, 4, 0], [2, 9, 3], [1, 1, 1], [0, 5, 8], [6, 0, 1], [3, 3, 3], [5, 8, 14]):
        inp = normal(3, max(lengths), DIM)
        for row, n in enumerate(lengths):
            inp[row, :n] = x[row, done[row] : done[row] + n]
        given = None if len(set(lengths)) == 1 else torch.tensor(lengths)
        with torch.no_grad():
            out, cache = module(inp, cache=cache, return_cache=True, lengths=given)
        for row, n in enumerate(lengths):
            close(out[row, :n], expected[row, done[row] : done[row] + n])
            assert (out[row, n:] == 0).all()
            done[row] += n
    assert cache.lengths == done == [30, 30, 30]


@pytest.mark.parametrize("setting", ["default", "paper", "shared rankings"])
def test_padding_beyond_the_longest_row(setting):
    """A batch padded to a width of its own, as a fixed shape wants it; and rows that take
    nothing."""
    module = layer(**SETTINGS[setting])
    x = normal(2, 20, DIM)
    expected = module(x)
    cache = KVCache()
    with torch.no_grad():
        assert (module(normal(2, 4, DIM), cache=cache, lengths=[0, 0]) == 0).all()
        for start, n in ((0, [9, 9]), (9, [11, 3])):
            inp = F.pad(x[:, start : start + max(n)], (0, 0, 0, 6), value=float("nan"))
            out = module(inp, cache=cache, lengths=n)
            for row in range(2):
                close(out[row, : n[row]], expected[row, start : start + n[row]])
                assert (out[row, n[row] :] == 0).all()


def test_no_rows_at_all():
    module = layer()
    out, cache = module(normal(0, 9, DIM), return_cache=True)
    assert out.shape == (0, 9, DIM) and cache.lengths == []
    assert module(normal(0, 1, DIM), cache=cache).shape == (0, 1, DIM)


def test_gradients_of_a_cached_call():
    """The first call through an empty cache has all its gradients; later ones those of their own
    tokens, the past held fixed."""
    module = layer()
    x = normal(2, 25, DIM)
    head, tail = x[:, :16], x[:, 16:]
    out, cache = module(head, return_cache=True)
    (grad,) = torch.autograd.grad(out.square().sum(), module.to_qkv.weight)
    (expected,) = torch.autograd.grad(module(head).square().sum(), module.to_qkv.weight)
    close(grad, expected)

    cache = cache.clone()
    leaf = tail.clone().requires_grad_()
    out, _ = module(leaf, cache=cache, return_cache=True)
    (grad,) = torch.autograd.grad(out.square().sum(), leaf)
    whole = torch.cat((head, leaf.detach()), dim=1).requires_grad_()
    (expected,) = torch.autograd.grad(module(whole)[:, 16:].square().sum(), whole)
    close(grad, expected[:, 16:])


def test_inference_mode_leaves_a_cache_for_all():
    """Prefill under inference_mode, then go on in any mode."""
    module = layer()
    x = normal(2, 25, DIM)
    expected = module(x)
    with torch.inference_mode():
        _, cache = module(x[:, :16], return_cache=True)
        cache.reorder([0, 1])
        copied = cache.clone()
    with torch.no_grad():
        close(module(x[:, 16:], cache=cache), expected[:, 16:])
    out = module(x[:, 16:], cache=copied)
    close(out, expected[:, 16:])
    out.sum().backward()
    with torch.inference_mode():
        close(module(x[:, :1], cache=cache), module(x[:, :1], cache=copied))


def test_a_step_copies_nothing():
    """Fixed capacity: one allocation. Growing: powers of two."""
    module = layer()
    with torch.no_grad():
        fixed, growing = KVCache(max_length=64), KVCache()
        sizes = []
        for t in range(64):
            for cache in (fixed, growing):
                module(normal(1, 1, DIM), cache=cache)
            if t == 3:
                storage = {name: s.data_ptr() for name, s in fixed._streams.items()}
            sizes.append(growing._streams["k"].shape[2])
        assert {name: s.data_ptr() for name, s in fixed._streams.items()} == storage
        assert sorted(set(sizes)) == [1, 2, 4, 8, 16, 32, 64]
        assert fixed._streams["k"].shape[2] == 64 and fixed._streams["ck"].shape[2] == 16


def test_a_full_cache_raises_before_it_writes():
    module = layer()
    cache = KVCache(max_length=10)
    with torch.no_grad():
        module(normal(2, 8, DIM), cache=cache)
        before = cache.clone()
        with pytest.raises(ValueError, match=re.escape("row 0 holds 8 of max_length=10 tokens, 3")):
            module(normal(2, 3, DIM), cache=cache)
        assert cache.lengths == [8, 8]
        assert all(torch.equal(cache._streams[n], before._streams[n]) for n in cache._streams)
        module(normal(2, 2, DIM), cache=cache)


@pytest.mark.parametrize("setting", ["default", "shared rankings", "independent"])
def test_truncate(setting):
    module = layer(**SETTINGS[setting])
    x, other = normal(2, 40, DIM), normal(2, 40, DIM)
    with torch.no_grad():
        expected = module(x)
        # speculate, take back, go on
        _, cache = module(torch.cat((x[:, :21], other[:, :14]), dim=1), return_cache=True)
        cache.truncate(21)
        out, _ = module(x[:, 21:], cache=cache, return_cache=True)
        close(out, expected[:, 21:])
        # each row to a length of its own
        _, cache = module(x[:, :35], return_cache=True)
        cache.truncate(torch.tensor([30, 23]))
        assert cache.lengths == [30, 23] and len(cache) == 30 and not cache.is_uniform
        step = torch.stack((x[0, 30:34], x[1, 23:27]))
        out, _ = module(step, cache=cache, return_cache=True)
        close(out[0], expected[0, 30:34])
        close(out[1], expected[1, 23:27])
        # a row starts anew, the other goes on
        cache.truncate([0, 27])
        out, _ = module(torch.stack((other[0, :9], x[1, 27:36])), cache=cache, return_cache=True)
        close(out[0], module(other[:1, :9])[0])
        close(out[1], expected[1, 27:36])


def test_truncate_reaches_as_far_as_it_says():
    module = layer()
    x = normal(1, 200, DIM)
    with torch.no_grad():
        expected = module(x)
        cache = KVCache(rollback=50)
        module(x, cache=cache)
        with pytest.raises(ValueError, match=re.escape("lengths[0]=149 is out of reach")):
            cache.truncate(149)
        cache.truncate(180)
        cache.truncate(150)
        out, _ = module(x[:, 150:], cache=cache, return_cache=True)
        close(out, expected[:, 150:])
        for bad, message in [
            (201, "between 0 and 200, got 201"),
            ([1, 2], "got 2"),
            (-1, "got -1"),
        ]:
            with pytest.raises(ValueError, match=message):
                cache.truncate(bad)
        cache.reset()
        assert len(cache) == 0
        out, _ = module(x[:, :30], cache=cache, return_cache=True)
        close(out, expected[:, :30])


@pytest.mark.parametrize("bad", [[1.5, 2], torch.tensor([1.0, 2.0]), 2.5, torch.tensor(2.0), "ab"])
def test_numbers_of_tokens_are_integers(bad):
    module = layer()
    _, cache = module(normal(2, 9, DIM), return_cache=True)
    for call, name in [
        (lambda: module(normal(2, 9, DIM), cache=cache, lengths=bad), "lengths"),
        (lambda: cache.truncate(bad), "lengths"),
        (lambda: cache.reorder(bad), "rows"),
    ]:
        with pytest.raises(ValueError, match=f"{name} must be integers, one for each row, got"):
            call()
    assert cache.lengths == [9, 9]


def test_a_first_call_that_failed_leaves_nothing():
    module, cache = layer(backend="flex", use_diff_topk=True), KVCache()
    with pytest.raises(NotImplementedError):
        module(normal(2, 9, DIM), cache=cache)
    module.backend = "eager"
    x = normal(1, 5, DIM)
    close(module(x, cache=cache), module(x))


@pytest.mark.parametrize("setting", ["default", "shared rankings"])
def test_reorder(setting):
    module = layer(**SETTINGS[setting])
    x = normal(3, 30, DIM)
    with torch.no_grad():
        expected = module(x)
        _, cache = module(x[:, :22], return_cache=True, lengths=[22, 13, 7])
        beams = torch.tensor([2, 0, 0, 1])
        cache.reorder(beams)
        assert cache.lengths == [7, 22, 22, 13]
        step = torch.stack([x[r, n : n + 5] for r, n in zip([2, 0, 0, 1], cache.lengths)])
        out, _ = module(step, cache=cache, return_cache=True)
        for row, (r, n) in enumerate(zip([2, 0, 0, 1], [7, 22, 22, 13])):
            close(out[row], expected[r, n : n + 5])
        with pytest.raises(ValueError, match="rows must be between 0 and 3, got 4"):
            cache.reorder([0, 4])


def test_clone_to_and_size():
    module = layer()
    x = normal(2, 20, DIM)
    with torch.no_grad():
        _, cache = module(x, return_cache=True)
        copy = cache.clone()
        a, _ = module(x[:, :5], cache=cache, return_cache=True)
        b, _ = module(x[:, :5], cache=copy, return_cache=True)
        close(a, b)
    assert cache.nbytes == sum(t.nbytes for t in (*cache._streams.values(), *cache._tail.values()))
    assert cache.to("cpu") is cache and cache.device == torch.device("cpu")
    assert KVCache() and len(KVCache()) == 0 and KVCache().nbytes == 0 and KVCache().device is None
    assert "lengths=[25, 25]" in repr(cache)


def test_another_layers_cache():
    x = normal(2, 9, DIM)
    with torch.no_grad():
        _, cache = layer()(x, return_cache=True)
        with pytest.raises(ValueError, match="cache holds k of 2 heads x 8, got 4 x 8"):
            layer(kv_heads=4)(x, cache=cache)
        with pytest.raises(
            ValueError, match="cache holds k in torch.float64 on cpu, got torch.float32"
        ):
            layer(dtype=torch.float32)(x.float(), cache=cache)
        with pytest.raises(ValueError, match="cache holds 2 rows but the input has 1"):
            layer()(x[:1], cache=cache)
        assert cache.lengths == [9, 9]


@pytest.mark.parametrize(
    "kwargs, message",
    [
        (dict(max_length=0), "max_length must be an integer of at least 1, got 0"),
        (dict(batch=1.5), "batch must be an integer of at least 1, got 1.5"),
        (dict(rollback=-1), "rollback must be an integer of at least 0, got -1"),
    ],
)
def test_bad_constructor(kwargs, message):
    with pytest.raises(ValueError, match=message):
        KVCache(**kwargs)


def test_no_tail_at_all():
    """Windows of one token and no rollback: nothing to remember."""
    module = layer(compress_block_size=1, compress_block_sliding_stride=1)
    x = normal(1, 12, DIM)
    cache = KVCache(rollback=0)
    with torch.no_grad():
        outs = [module(t, cache=cache, return_cache=True)[0] for t in x.split(3, dim=1)]
    close(torch.cat(outs, dim=1), module(x))


def test_reordering_as_many_rows_moves_no_storage():
    module, cache = layer(), KVCache()
    x = normal(3, 20, DIM)
    with torch.no_grad():
        module(x[:, :15], cache=cache)
        where = {name: t.data_ptr() for name, t in cache.tensors().items()}
        cache.reorder([1, 1, 0])
        assert {name: t.data_ptr() for name, t in cache.tensors().items()} == where
        close(module(x[[1, 1, 0], 15:], cache=cache), module(x)[[1, 1, 0], 15:])


@pytest.mark.parametrize("length", [1, 3, 700, 1024, 1025, 5000])
def test_storage_has_little_room_that_nothing_uses(length):
    store = KVCache(batch=1).reserve({"k": torch.empty(1, 1, 0, 4)}, [length])["k"]
    assert length <= store.shape[2] <= (2 * length - 1 if length <= 1024 else 1.125 * length)
