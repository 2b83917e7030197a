"""`StaticSparseCache`: compressed keys beside static keys and values."""

import pytest
import torch

transformers = pytest.importorskip("transformers", reason="needs the extra hf")

from transformers.cache_utils import StaticLayer

from native_sparse_attention.hf import StaticSparseCache, attention, use_sparse_attention
from tests.helpers.tiny_models import CACHE, SPARSE, prompts, tiny

TOL = dict(atol=1e-4, rtol=1e-4)
close = torch.testing.assert_close
WINDOWS = [(8, 4), (4, 4), (6, 2), (1, 1)]


def sparse(l, d, family="Llama", **config):
    sizes = dict(compress_block_size=l, compress_block_sliding_stride=d)
    return use_sparse_attention(tiny(family, **config), **SPARSE | sizes)


def steps(model, step, ids, cache, first, chunk=1):
    """Logits of tokens from `first` on, so many at a time."""
    found = []
    for i in range(first, ids.shape[1], chunk):
        at = torch.arange(i, i + chunk).expand(len(ids), -1)
        given = dict(position_ids=at, attention_mask=None) | {CACHE: cache}
        found.append(step(ids[:, i : i + chunk], **given).logits)
    return torch.cat(found, dim=1)


@pytest.fixture
def reads_no_window_again(monkeypatch):
    """Compressed keys of a step come from the cache."""

    def refused(*args):
        raise AssertionError("the cache has these windows")

    return lambda: monkeypatch.setattr(attention, "windows_of", refused)


@pytest.mark.parametrize("l, d", WINDOWS)
@torch.no_grad()
def test_steps_are_one_forward(l, d, reads_no_window_again):
    model, ids = sparse(l, d), torch.cat(prompts(50, 50))
    expected = model(ids, use_cache=False).logits
    cache = StaticSparseCache(model.config, max_cache_len=61)
    close(model(ids[:, :33], **{CACHE: cache}).logits, expected[:, :33], **TOL)
    if l > 1:
        reads_no_window_again()
    close(steps(model, model, ids, cache, 33), expected[:, 33:], **TOL)


@torch.no_grad()
def test_chunks_of_any_length_are_one_forward():
    model, ids = sparse(8, 4), torch.cat(prompts(49, 49))
    expected = model(ids, use_cache=False).logits
    for first, chunk in ((1, 8), (5, 11), (33, 4)):
        cache = StaticSparseCache(model.config, max_cache_len=49)
        model(ids[:, :first], **{CACHE: cache})
        close(steps(model, model, ids, cache, first, chunk), expected[:, first:], **TOL)


@torch.no_grad()
def test_a_compiled_step_reads_what_the_cache_keeps(reads_no_window_again):
    model, ids = sparse(8, 4, num_hidden_layers=1), torch.cat(prompts(46, 46))
    expected = model(ids, use_cache=False).logits
    cache = StaticSparseCache(model.config, max_cache_len=64)
    model(ids[:, :40], **{CACHE: cache})
    reads_no_window_again()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    close(steps(model, compiled, ids, cache, 40), expected[:, 40:], **TOL)


@pytest.mark.skipif(not hasattr(StaticLayer, "crop"), reason="this release takes no tokens back")
@torch.no_grad()
def test_tokens_that_are_taken_back_leave_nothing():
    model, ids = sparse(8, 4), torch.cat(prompts(50, 50))
    expected = model(ids, use_cache=False).logits
    cache = StaticSparseCache(model.config, max_cache_len=64)
    model(ids[:, :30], **{CACHE: cache})
    steps(model, model, torch.cat(prompts(41, 41)), cache, 30)
    cache.crop(-11)
    close(steps(model, model, ids, cache, 30), expected[:, 30:], **TOL)


@pytest.mark.parametrize(
    "given, message",
    [
        (dict(config=None, max_cache_len=8), "config must be model.config, got None"),
        (dict(max_cache_len=0), "max_cache_len must be an integer of at least 1, got 0"),
        (dict(max_cache_len=8.0), "max_cache_len must be an integer of at least 1, got 8.0"),
    ],
)
def test_wrong_arguments(given, message):
    with pytest.raises(ValueError, match=message):
        StaticSparseCache(**dict(config=sparse(8, 4).config) | given)
