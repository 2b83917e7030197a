"""A cache belongs to the layer that first used it, and to its geometry."""

import copy
import gc
import pickle
import re

import pytest
import torch

from native_sparse_attention import KVCache, PagedKVCache, Transformer
from native_sparse_attention.transformer import Attention
from tests.helpers.layers import DIM, SETTINGS, layer


def normal(*shape):
    return torch.randn(*shape, dtype=torch.float64)


def close(actual, expected):
    torch.testing.assert_close(actual, expected, atol=1e-12, rtol=1e-12)


CHANGED = {
    "compress_block_sliding_stride": dict(compress_block_sliding_stride=8),
    "compress_block_size": dict(compress_block_size=4),
    "branch_kv": dict(branch_kv="independent"),
    "selection_stride": dict(selection_stride=4),
}


@pytest.mark.parametrize("make", [KVCache, lambda: PagedKVCache(8, 12, 2, 48)])
@pytest.mark.parametrize("name", CHANGED)
def test_another_geometry(name, make):
    """Named, and nothing is written."""
    cache, x = make(), normal(2, 13, DIM)
    first, other = layer(), layer(**CHANGED[name])
    with torch.no_grad():
        first(x[:, :9], cache=cache)
        message = f"{name}={getattr(first, name)!s}, this one has {name}={getattr(other, name)!s}"
        with pytest.raises(ValueError, match=re.escape(message)):
            other(x[:, 9:], cache=cache)
        close(first(x[:, 9:], cache=cache), first(x)[:, 9:])


def test_blocks_of_shared_rankings():
    """How many a token has lies in the cache; without shared rankings it does not."""
    x = normal(1, 20, DIM)
    for changed, fails in (({}, False), (SETTINGS["shared rankings"], True)):
        module, cache = layer(**changed), KVCache()
        with torch.no_grad():
            module(x[:, :18], cache=cache)
            module.num_selected_blocks = 1
            if fails:
                with pytest.raises(ValueError, match="num_selected_blocks=2, this one has"):
                    module(x[:, 18:], cache=cache)
            else:
                close(module(x[:, 18:], cache=cache), module(x)[:, 18:])


def test_another_layer_of_the_same_geometry():
    x = normal(2, 13, DIM)
    for first, other in (
        (layer(), layer()),
        (Attention(DIM, 8, 4).double(), Attention(DIM, 8, 4).double()),
        (layer(kv_heads=4), Attention(DIM, 8, 4).double()),
    ):
        for third in (other, copy.deepcopy(first), pickle.loads(pickle.dumps(first))):
            cache = KVCache()
            with torch.no_grad():
                first(x[:, :9], cache=cache)
                for held in (cache, cache.clone(), copy.deepcopy(cache), copy.copy(cache)):
                    with pytest.raises(ValueError, match="cache holds tokens of a"):
                        third(x[:, 9:], cache=held)
                cache.truncate(5)
                cache.reorder([1, 0])
                with pytest.raises(ValueError, match="cache holds tokens of a"):
                    third(x[:, 9:], cache=cache)
                close(first(x[:, 5:].flip(0), cache=cache), first(x)[:, 5:].flip(0))


def test_a_cache_without_tokens_is_anybodys():
    """A new one, one of a call that failed, one whose rows were all reset."""
    x, cache = normal(2, 13, DIM), KVCache(32, 2)
    modules = [layer(), layer(), layer(compress_block_sliding_stride=8), layer(kv_heads=4)]
    with torch.no_grad():
        with pytest.raises(ValueError, match="cache is full"):
            modules[0](normal(2, 33, DIM), cache=cache)
        for module in (*modules, *modules):
            close(module(x, cache=cache), module(x))
            cache.reset([0])
            with pytest.raises(ValueError, match="cache holds .* layer"):
                layer()(x, cache=cache)
            cache.reset([1])


def test_the_same_layer_in_other_clothes():
    """Called with other weights, copied together with its cache."""
    x, module, cache = normal(2, 13, DIM), layer(), KVCache()
    with torch.no_grad():
        expected = module(x)
        module(x[:, :9], cache=cache)
        shallow = copy.copy(module)
        for run in (module, shallow, torch.nn.Sequential(module)[0]):
            close(run(x[:, 9:], cache=copy.deepcopy(cache)), expected[:, 9:])
        weights = {name: p.clone() for name, p in module.named_parameters()}
        given = (x[:, 9:],), {"cache": cache.clone()}
        close(torch.func.functional_call(module, weights, *given), expected[:, 9:])
        for make in (copy.deepcopy, lambda both: pickle.loads(pickle.dumps(both))):
            moved, held = make((module, cache))
            close(moved(x[:, 9:], cache=held), expected[:, 9:])
        # a cache alone: for the next layer of its geometry
        held = pickle.loads(pickle.dumps(cache))
        close(pickle.loads(pickle.dumps(module))(x[:, 9:], cache=held), expected[:, 9:])
        with pytest.raises(ValueError, match="cache holds tokens of another layer"):
            module(x[:, :1], cache=held)
        with pytest.raises(ValueError, match="compress_block_sliding_stride=4, this one has"):
            held = pickle.loads(pickle.dumps(cache))
            layer(compress_block_sliding_stride=8)(x[:, 9:], cache=held)


@pytest.mark.parametrize("use_sparse_attn", [True, False])
def test_caches_of_a_model_in_another_order(use_sparse_attn):
    """Nothing is written, not even by the layers before the first that is wrong."""
    model = Transformer(40, 16, 3, dim_head=8, heads=2, use_sparse_attn=use_sparse_attn)
    ids, cache = torch.randint(0, 40, (2, 9)), model.new_cache()
    with torch.no_grad():
        model(ids[:, :5], cache=cache)
        for order in ([1, 0, 2], [0, 2, 1]):
            with pytest.raises(ValueError, match="cache holds tokens of another layer"):
                model(ids[:, 5:], cache=[cache[i] for i in order])
        with pytest.raises(ValueError, match="got one of them twice"):
            model(ids, cache=[KVCache()] * 3)
        with pytest.raises(ValueError, match="cache holds tokens of another layer"):
            copy.deepcopy(model)(ids[:, 5:], cache=cache)
        torch.testing.assert_close(model(ids[:, 5:], cache=cache), model(ids)[:, 5:])
        moved, held = copy.deepcopy((model, model.new_cache()))
        moved(ids, cache=held)


def test_copies_in_either_order():
    """A cache that is copied with its layer belongs to the copy, a cache alone to the layer."""
    module, cache, x = layer(), KVCache(), normal(1, 12, DIM)
    with torch.no_grad():
        expected = module(x)[:, 9:]
        module(x[:, :9], cache=cache)
        for order in ((0, 1), (1, 0)):
            both = [(module, cache)[i] for i in order]
            copied = copy.deepcopy(copy.deepcopy(both))
            other, held = (copied[order.index(i)] for i in range(2))
            with pytest.raises(ValueError, match="another layer"):
                module(x[:, 9:], cache=held.clone())
            close(other(x[:, 9:], cache=held), expected)
            del other, copied
            gc.collect()
            with pytest.raises(ValueError, match="another layer"):
                module(x[:, :1], cache=held)
        alone = copy.deepcopy(copy.deepcopy(cache))
        with pytest.raises(ValueError, match="another layer"):
            copy.deepcopy(module)(x[:, 9:], cache=alone)
        close(module(x[:, 9:], cache=alone), expected)


@pytest.mark.parametrize("limits", [{}, dict(max_length=20, batch=1)])
def test_an_empty_cache_takes_another_dtype(limits):
    module, cache, x = layer(), KVCache(**limits), normal(1, 12, DIM)
    with torch.no_grad():
        module(x[:, :9], cache=cache)
        with pytest.raises(ValueError, match="cache holds k in torch.float64"):
            module.float()(x[:, 9:].float(), cache=cache)
        cache.reset()
        outs = [module(part.float(), cache=cache) for part in x.split([9, 3], dim=1)]
        torch.testing.assert_close(torch.cat(outs, dim=1), module(x.float()))
        assert cache.lengths == [12]


def test_caches_of_earlier_versions():
    """Their state has no `_copied`."""
    module, cache, x = layer(), KVCache(), normal(1, 12, DIM)
    with torch.no_grad():
        module(x[:, :9], cache=cache)
        old = pickle.loads(pickle.dumps(cache))
        del old.__dict__["_copied"]
        close(module(x[:, 9:], cache=copy.deepcopy(old)), module(x)[:, 9:])
        close(module(x[:, 9:], cache=old), module(x)[:, 9:])
