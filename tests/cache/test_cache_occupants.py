"""Nothing of what a row held before is seen by what takes its place, finite or not."""

import pytest
import torch

from native_sparse_attention import KVCache, PagedKVCache
from native_sparse_attention.ops.decode import decode_attention
from native_sparse_attention.transformer import Attention
from tests.helpers.layers import DIM, SETTINGS, layer
from tests.kernels.decode.test_decode import problem, ring

NAN, INF = float("nan"), float("inf")
LAWS = ["default", "paper", "independent", "shared rankings", "interpolated", "window of windows"]


def normal(*shape):
    return torch.randn(*shape, dtype=torch.float64)


def close(actual, expected):
    torch.testing.assert_close(actual, expected, atol=1e-12, rtol=1e-12)


def rows():
    return KVCache(64, 2)


def grown():
    return KVCache()


def pages():
    return PagedKVCache(8, 16, 2, 64)


def modules():
    return [layer(**SETTINGS[name]) for name in LAWS] + [Attention(DIM, 8, 4).double()]


@pytest.mark.slow(one_of=3)
@pytest.mark.parametrize("value", [NAN, INF])
@pytest.mark.parametrize("make", [rows, grown, pages])
def test_a_row_that_went_wrong(make, value):
    """Its last tokens are not finite; then some of them are taken back, or all; chunks of several
    tokens and single ones follow, while the other row is longer."""
    for module in modules():
        x, new = normal(2, 21, DIM), normal(2, 17, DIM)
        expected, bad = module(torch.cat((x, new), dim=1)), x.clone()
        bad[0, 9:] = value
        for kept in (9, 0):
            text = torch.cat((x[:1, :kept], new[:1]), dim=1)
            alone, cache = module(text)[0, kept:], make()
            with torch.no_grad():
                module(bad, cache=cache)
                cache.reset([0]) if kept == 0 else cache.truncate([kept, 21])
                cache = cache.clone()
                outs = [module(part, cache=cache) for part in new.split([3, 1, 13], dim=1)]
            out = torch.cat(outs, dim=1)
            close(out[0], alone)
            close(out[1], expected[1, 21:])


@pytest.mark.parametrize("make", [rows, grown, pages])
def test_rows_that_are_copied_and_moved(make):
    """Beams: the row that went wrong is dropped, and another takes its place."""
    for module in modules():
        x, new = normal(2, 21, DIM), normal(2, 5, DIM)
        expected, bad, cache = module(torch.cat((x[1:], new[:1]), dim=1)), x.clone(), make()
        bad[0] = NAN
        with torch.no_grad():
            module(bad, cache=cache, lengths=[21, 21])
            cache.reorder([1, 0])
            cache.truncate([21, 3])
            cache.reset([1])
            out = module(new, cache=cache)
            close(out[0], expected[0, 21:])
            close(out[1], module(new[1:])[0])
            cache.reset()
            close(module(new, cache=cache), module(new))


@pytest.mark.parametrize("make", [rows, grown, pages])
def test_padding_is_never_seen(make):
    """By whichever row, in this call or in later ones."""
    for module in modules():
        x = normal(2, 30, DIM)
        expected, cache, done = module(x), make(), [0, 0]
        with torch.no_grad():
            for counts in ([12, 3], [1, 9], [0, 2], [5, 5]):
                inp = torch.full((2, 12, DIM), NAN, dtype=torch.float64)
                for row, n in enumerate(counts):
                    inp[row, :n] = x[row, done[row] : done[row] + n]
                out = module(inp, cache=cache, lengths=counts)
                for row, n in enumerate(counts):
                    close(out[row, :n], expected[row, done[row] : done[row] + n])
                    done[row] += n


@pytest.mark.parametrize("make", [rows, grown])
def test_a_call_that_failed_after_it_wrote(make, monkeypatch):
    module, x = layer(), normal(2, 20, DIM)
    expected, cache = module(x), make()
    with torch.no_grad():
        module(x[:, :9], cache=cache, lengths=[9, 4])
        with monkeypatch.context() as patch:
            patch.setattr(module, "attend", lambda *args, **kwargs: 1 // 0)
            with pytest.raises(ZeroDivisionError):
                module(torch.full_like(x, NAN)[:, :8], cache=cache)
        out = module(torch.stack((x[0, 9:12], x[1, 4:7])), cache=cache)
        close(out[0], expected[0, 9:12])
        close(out[1], expected[1, 4:7])


@pytest.mark.parametrize("changed", [{}, dict(page=16), dict(window=True, selection_stride=2)])
def test_decode_attention_by_eager_pytorch(changed):
    tensors, settings = problem(torch.float64, T=3, lengths=(43, 5), **changed)
    outs = []
    for value in (0.0, NAN, INF):
        given = dict(tensors)
        for name in tensors.keys() & {"k", "v", "ck", "cv", "window_k", "window_v"}:
            every = 4 if name in ("ck", "cv") else 1
            given[name] = poisoned(tensors[name], settings, every, value)
        if "selection_stride" in changed:
            settings["ranking"] = ring(settings, (2, 1), 2)
        outs.append(decode_attention(**given, **settings, backend="eager"))
    assert outs[0].isfinite().all()
    torch.testing.assert_close(outs[1:], outs[:1] * 2, atol=0.0, rtol=0.0)


def poisoned(t, settings, every, value):
    """Storage with a value behind the ends of the rows, three tokens later."""
    t, table = t.clone(), settings.get("page_table")
    for row, length in enumerate(settings["lengths"].tolist()):
        end = (length + 3) // every
        if table is None:
            t[row, end:] = value
            continue
        for place, page in enumerate(table[row].tolist()):
            t[page, max(0, end - place * t.shape[1]) :] = value
    return t
