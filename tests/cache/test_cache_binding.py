"""A cache belongs to the layer that first used it, and to its geometry."""

import copy
import pickle
import re

import pytest
import torch

from native_sparse_attention import KVCache, PagedKVCache, Transformer
from native_sparse_attention.transformer import Attention
from tests.helpers.layers import DIM, SETTINGS, close, layer, normal

CHANGED = {
    "compress_block_sliding_stride": 8,
    "compress_block_size": 4,
    "branch_kv": "independent",
    "selection_stride": 4,
}


@pytest.fixture(autouse=True)
def no_grad():
    with torch.no_grad():
        yield


@pytest.mark.parametrize("make", [KVCache, lambda: PagedKVCache(8, 12, 2, 48)])
@pytest.mark.parametrize("name", CHANGED)
def test_another_geometry(name, make):
    """Named, and nothing is written."""
    cache, x, first = make(), normal(2, 13, DIM), layer()
    first(x[:, :9], cache=cache)
    message = f"{name}={getattr(first, name)!s}, this one has {name}={CHANGED[name]}"
    with pytest.raises(ValueError, match=re.escape(message)):
        layer(**{name: CHANGED[name]})(x[:, 9:], cache=cache)
    close(first(x[:, 9:], cache=cache), first(x)[:, 9:])


def test_blocks_of_shared_rankings():
    """How many a token has lies in the cache; without shared rankings it does not."""
    x = normal(1, 20, DIM)
    module, cache = layer(), KVCache()
    module(x[:, :18], cache=cache)
    module.num_selected_blocks = 1
    close(module(x[:, 18:], cache=cache), module(x)[:, 18:])
    module, cache = layer(**SETTINGS["shared rankings"]), KVCache()
    module(x[:, :18], cache=cache)
    module.num_selected_blocks = 1
    with pytest.raises(ValueError, match="num_selected_blocks=2, this one has"):
        module(x[:, 18:], cache=cache)


@pytest.mark.parametrize("make", [layer, lambda: Attention(DIM, 8, 4).double()])
def test_another_layer_of_the_same_geometry(make):
    """And copies of caches, whichever way they are copied."""
    x, first = normal(2, 13, DIM), make()
    for other in (make(), copy.deepcopy(first), pickle.loads(pickle.dumps(first))):
        cache = KVCache()
        first(x[:, :9], cache=cache)
        for held in (cache, cache.clone(), copy.deepcopy(cache), copy.copy(cache)):
            with pytest.raises(ValueError, match="cache holds tokens of a"):
                other(x[:, 9:], cache=held)
        cache.truncate(5)
        cache.reorder([1, 0])
        with pytest.raises(ValueError, match="cache holds tokens of a"):
            other(x[:, 9:], cache=cache)
        close(first(x[:, 5:].flip(0), cache=cache), first(x)[:, 5:].flip(0))


def test_a_cache_without_tokens_is_anybodys():
    """A new one, one of a call that failed, one whose rows were all reset; of any dtype too."""
    x, cache = normal(2, 13, DIM), KVCache(32, 2)
    modules = [layer(), layer(compress_block_sliding_stride=8), layer(kv_heads=4)]
    with pytest.raises(ValueError, match="cache is full"):
        modules[0](normal(2, 33, DIM), cache=cache)
    for module in (*modules, *modules):
        close(module(x, cache=cache), module(x))
        cache.reset([0])
        with pytest.raises(ValueError, match="cache holds .* layer"):
            layer()(x, cache=cache)
        cache.reset([1])
    module = layer(torch.float32)
    outs = [module(part.float(), cache=cache) for part in x.split([9, 4], dim=1)]
    torch.testing.assert_close(torch.cat(outs, dim=1), module(x.float()))


def test_the_same_layer_in_other_clothes():
    """Called with other weights, copied together with its cache."""
    x, module, cache = normal(2, 13, DIM), layer(), KVCache()
    expected = module(x)[:, 9:]
    module(x[:, :9], cache=cache)
    for run in (module, copy.copy(module), torch.nn.Sequential(module)[0]):
        close(run(x[:, 9:], cache=copy.deepcopy(cache)), expected)
    weights = {name: p.clone() for name, p in module.named_parameters()}
    given = (x[:, 9:],), {"cache": cache.clone()}
    close(torch.func.functional_call(module, weights, *given), expected)
    for duplicate in (copy.deepcopy, lambda both: pickle.loads(pickle.dumps(both))):
        other, held = duplicate((module, cache))
        close(other(x[:, 9:], cache=held), expected)
        with pytest.raises(ValueError, match="another layer"):
            module(x[:, :1], cache=held)
    # a pickled cache alone: for the next layer of its geometry
    held = pickle.loads(pickle.dumps(cache))
    close(pickle.loads(pickle.dumps(module))(x[:, 9:], cache=held), expected)
    with pytest.raises(ValueError, match="cache holds tokens of another layer"):
        module(x[:, :1], cache=held)


def test_a_copied_model_has_caches_of_its_own():
    model, ids = Transformer(40, 16, 2, dim_head=8, heads=2), torch.randint(0, 40, (2, 9))
    cache = model.new_cache()
    model(ids[:, :5], cache=cache)
    with pytest.raises(ValueError, match="cache holds tokens of another layer"):
        copy.deepcopy(model)(ids[:, 5:], cache=cache)
    moved, held = copy.deepcopy((model, cache))
    torch.testing.assert_close(moved(ids[:, 5:], cache=held), model(ids)[:, 5:])
