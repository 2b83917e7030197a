"""Prefill in any chunks and decoding are one forward: for every setting, in every cache, with the
gradients of each chunk over a past that is held fixed. A cache belongs to the layer that first used
it, and to its geometry."""

import copy
import itertools
import pickle
import re

import pytest
import torch

from native_sparse_attention import KVCache, PagedKVCache, Transformer
from native_sparse_attention.ops import branches
from native_sparse_attention.transformer import Attention
from tests.helpers.decoder import CACHES, Decoder
from tests.helpers.layers import DIM, LAYERS, SETTINGS, close, layer, normal

pytestmark = pytest.mark.usefixtures("untraced_flex")
NAN, INF = float("nan"), float("inf")
caches = pytest.mark.parametrize("make", CACHES.values(), ids=list(CACHES))

# tokens of each call, of each of three sequences
SCHEDULES = {
    "tokens": [(1,)] * 30,
    "whole": [(30,)],
    "chunks": [(5,), (1,), (13,), (2,), (8,), (1,)],
    "prompt": [(27,), (1,), (1,), (1,)],
    "ragged": [(13, 4, 0), (2, 9, 3), (1,), (0, 5, 8), (6, 0, 1), (3,), (5, 8, 14)],
}


@pytest.mark.slow(one_of=8)
@caches
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("kind", [*LAYERS, "flex"])
def test_one_forward(kind, schedule, make):
    """Of sequences of different lengths too, with padding that nobody sees."""
    if (kind, schedule) == ("flex", "ragged"):
        pytest.skip("its masks need one offset for all rows")
    module = layer(backend="flex") if kind == "flex" else LAYERS[kind]()
    decoder = Decoder(module, normal(3, 30, DIM), make(3))
    for counts in SCHEDULES[schedule]:
        decoder.step(*counts)
    assert len(decoder.cache) == 30


@pytest.mark.slow(one_of=6)
@caches
@pytest.mark.parametrize("value", [NAN, INF])
@pytest.mark.parametrize("kind", LAYERS)
def test_sequences_that_end_and_others(kind, value, make):
    """Tokens are taken back, sequences change places, are copied (beams) and begin anew: what lay
    there before, finite or not, is seen by nobody."""
    decoder = Decoder(LAYERS[kind](), normal(4, 40, DIM), make(3), rows=3)
    decoder.step(21, 13, 17)
    decoder.corrupt(11, 3, 6, value=value)
    decoder.step(3, 1, 0, width=9)
    decoder.truncate(11, 14, 9)
    decoder.step(1, times=3)
    decoder.reorder(2, 0, 1)
    decoder.step(4, 1, 2)
    decoder.corrupt(2, 5, 2, value=value)
    decoder.restart(1, 3)
    decoder.step(1, 9, 3)
    original, decoder.cache = decoder.cache, decoder.cache.clone()
    place = decoder.place
    decoder.step(2)
    decoder.reorder(1, 1, 0, 2)
    decoder.step(0, 3, 1, 1)
    decoder.cache = original
    decoder.move(place)
    decoder.step(2)
    decoder.cache.reset()
    decoder.move([(r, 0) for r in (3, 0, 2)])
    decoder.step(12)


@caches
@pytest.mark.parametrize("kind", ["default", "dense"])
def test_calls_of_nothing(kind, make):
    module = LAYERS[kind]()
    with torch.no_grad():
        cache = make()
        assert (module(normal(2, 4, DIM), cache=cache, lengths=[0, 0]) == 0).all()
        assert cache.lengths == [0, 0]
    # no window is complete: its parameters get zeros, as data-parallel training expects
    module(normal(2, 3, DIM), cache=make(), lengths=[0, 3]).sum().backward()
    assert all(p.grad is not None for p in module.parameters())
    if make is not CACHES["paged"]:
        cache = make()
        assert module(normal(0, 9, DIM), cache=cache).shape == (0, 9, DIM)
        assert module(normal(0, 1, DIM), cache=cache).shape == (0, 1, DIM)
        assert cache.lengths == []


@pytest.mark.kernels
def test_padding_by_kernels():
    """Left and right, of a prefill and of what follows."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    settings = dict(selection_stride=4, heads=2, kv_heads=1)
    for backend, n, tol in (("triton", 4, 1e-4), ("eager", 11, 1e-5)):
        module = layer(torch.float32, **settings, backend=backend).to(device)
        x = torch.randn(3, 13 + n, DIM, device=device)
        mask = torch.ones(3, 13 + n, dtype=torch.bool, device=device)
        mask[0, :6] = mask[1, 10:13] = mask[1, 13:15] = mask[2, -2:] = False
        cache = KVCache()
        with torch.no_grad():
            outs = [module(x[:, :13], cache=cache, mask=mask[:, :13])]
            outs.append(module(x[:, 13:], cache=cache, mask=mask[:, 13:]))
            assert cache.lengths == mask.sum(1).tolist()
            out, module.backend = torch.cat(outs, 1), "eager"
            assert (out[~mask] == 0).all()
            for row in range(3):
                alone = module(x[row : row + 1, mask[row]])[0]
                torch.testing.assert_close(out[row, mask[row]], alone, atol=tol, rtol=tol)


@caches
def test_inference_mode_leaves_a_cache_for_all(make):
    """Prefill under inference_mode, then go on in any mode."""
    module, cache, x = layer(**SPARSE), make(), normal(2, 25, DIM)
    expected = module(x)
    with torch.inference_mode():
        module(x[:, :16], cache=cache)
        cache.reorder([1, 0])
        copied = cache.clone()
    out = module(x[[1, 0], 16:], cache=copied)
    torch.testing.assert_close(out, expected[[1, 0], 16:])
    equal(gradients([out], [module.sinks]), gradients([expected[:, 16:]], [module.sinks]))
    with torch.inference_mode():
        cache.reset([1])
        module(x[[1, 0], :1], cache=cache)


@caches
def test_a_step_moves_no_storage(make):
    """Of a fixed capacity: a captured graph finds storage, page table and lengths where they were.
    What grows doubles."""
    module, cache, places = layer(), make(), set()
    with torch.no_grad():
        for step in range(32):
            module(normal(2, 1, DIM), cache=cache)
            places.add(tuple(t.data_ptr() for t in cache.tensors().values()))
            if step == 15:
                cache.reorder([1, 1])
    assert len(places) <= (9 if make is CACHES["growing"] else 1)


@pytest.mark.parametrize("length", [1, 3, 700, 1024, 1025, 5000])
def test_little_storage_that_nothing_uses(length):
    module = Attention(2, dim_head=2, heads=1)
    cache = KVCache()
    with torch.no_grad():
        module(torch.randn(1, length, 2), cache=cache)
        module(torch.randn(1, 1, 2), cache=cache)
    held = cache.memory()["k"] / (2 * 4)
    assert length < held <= (2 * length if length < 1024 else 1.125 * (length + 1))


@pytest.mark.parametrize("make", [KVCache, lambda **sizes: PagedKVCache(8, 40, **sizes)])
def test_memory(make):
    module, cache = layer(selection_stride=4), make(batch=2, max_length=64, rollback=9)
    assert cache.memory() == {} and cache.nbytes == 0 and cache.device is None and cache
    with torch.no_grad():
        module(normal(2, 10, DIM), cache=cache)
    is_paged, entry = isinstance(cache, PagedKVCache), 2 * 8 * 8
    tokens = 40 * 8 if is_paged else 2 * 64
    expected = {"k": tokens * entry, "v": tokens * entry}
    expected |= {"ck": tokens // 4 * entry, "cv": tokens // 4 * entry}
    expected |= {"tail k": 2 * 16 * entry, "tail v": 2 * 16 * entry}
    held = cache.memory()
    assert held | expected == held and cache.nbytes == sum(held.values())
    assert held.get("page_table") == (2 * 8 * 4 if is_paged else None)
    assert cache.to("cpu") is cache and cache.device == torch.device("cpu")
    assert "lengths=[10, 10]" in repr(cache)


def test_rollback():
    module, x = layer(), normal(1, 200, DIM)
    decoder = Decoder(module, x, KVCache(rollback=50))
    decoder.step(200)
    with pytest.raises(ValueError, match=re.escape("lengths[0]=149 is out of reach")):
        decoder.cache.truncate(149)
    decoder.truncate(180)
    decoder.truncate(150)
    decoder.step(50)
    # windows of one token and no rollback: nothing to remember
    module = layer(compress_block_size=1, compress_block_sliding_stride=1)
    decoder = Decoder(module, normal(1, 12, DIM), KVCache(rollback=0))
    decoder.step(3, times=4)


@caches
def test_a_call_that_failed(make, monkeypatch):
    """Before it wrote, the cache is what it was; after it wrote, nothing of it is seen."""
    module = layer()
    decoder = Decoder(module, normal(2, 20, DIM), make())
    decoder.step(9, 4)
    with monkeypatch.context() as patch:
        patch.setattr(branches, "attend", lambda *args, **kwargs: 1 // 0)
        with pytest.raises(ZeroDivisionError), torch.no_grad():
            module(torch.full_like(decoder.x, NAN)[:, :8], cache=decoder.cache)
    decoder.step(3)
    new, flex = make(), layer(backend="flex", use_diff_topk=True)
    with pytest.raises(NotImplementedError):
        flex(decoder.x, cache=new)
    decoder = Decoder(module, decoder.x, new)
    decoder.step(5)


def test_a_full_cache_writes_nothing():
    x, module = normal(2, 30, DIM), layer()
    pages, rows = PagedKVCache(8, 5, batch=2, max_length=64), KVCache(max_length=13)
    for cache, call, message in (
        (rows, dict(lengths=[3, 3]), "row 0 holds 11 of max_length=13 tokens, 3"),
        (pages, {}, "2 pages needed, 1 of num_pages=5 free"),
        (pages, dict(lengths=[6, 0]), None),
    ):
        cache.reset()
        decoder = Decoder(module, x, cache)
        decoder.step(11)
        before = {name: t.clone() for name, t in cache.tensors().items()}
        if message:
            with pytest.raises(ValueError, match=re.escape(f"cache is full: {message}")):
                module(x[:, 11:17], cache=cache, **call)
            after = cache.tensors()
            assert all(torch.equal(after[name], t) for name, t in before.items())
        decoder.step(2)


def test_bad_arguments():
    module, cache = layer(), KVCache(64, 2)
    with torch.no_grad():
        module(normal(2, 10, DIM), cache=cache)
    for call, message in [
        (lambda: layer()(normal(2, 4, DIM), cache=PagedKVCache(12, 4, 2, 48)),
         "page_size must be a multiple of"),
        (lambda: cache.truncate(11), "between 0 and 10, got 11"),
        (lambda: module(normal(2, 9, DIM), cache=cache, lengths=[1.5, 2]), "lengths must be inte"),
        (lambda: layer(kv_heads=4)(normal(2, 1, DIM), cache=cache),
         "cache holds k of 2 heads x 8, got 4 x 8"),
        (lambda: layer(dtype=torch.float32)(torch.randn(2, 1, DIM), cache=cache),
         "cache holds k in torch.float64 on cpu, got torch.float32"),
        (lambda: PagedKVCache(8, 9, 2, 48).reserve([1, 1]), "cache has no pages to reserve before"),
    ]:  # fmt: skip
        with pytest.raises(ValueError, match=re.escape(message)):
            call()
    assert cache.lengths == [10, 10]


@pytest.mark.parametrize("use_sparse_attn", [True, False])
def test_caches_of_a_model(use_sparse_attn):
    """Nothing is written where one is wrong, not even by the layers before it."""
    shape = dict(num_tokens=32, dim=16, depth=3, dim_head=8, heads=2)
    published = dict(use_sparse_attn=True, sparse_attn_kwargs={})
    net = Transformer(**shape, **published if use_sparse_attn else {})
    ids = torch.randint(0, 32, (2, 30))
    kinds = [{}, dict(max_length=40, batch=2)]
    kinds.append(dict(max_length=40, batch=2, page_size=8, num_pages=9))
    with torch.no_grad():
        for kind in kinds:
            cache = net.new_cache(**kind)
            assert [type(t) for t in cache] == [PagedKVCache if len(kind) == 4 else KVCache] * 3
            parts = [net(part, cache=cache) for part in ids[:, :12].split([11, 1], dim=1)]
            for order in ([1, 0, 2], [0, 2, 1]):
                with pytest.raises(ValueError, match="cache holds tokens of another layer"):
                    net(ids[:, 12:], cache=[cache[i] for i in order])
            parts.append(net(ids[:, 12:], cache=cache))
            torch.testing.assert_close(torch.cat(parts, dim=1), net(ids), atol=1e-5, rtol=1e-5)
        with pytest.raises(ValueError, match="got one of them twice"):
            net(ids, cache=[KVCache()] * 3)
        for third, message in (
            (KVCache(max_length=29), "cache is full"), (PagedKVCache(8, 2, 2, 40), "cache is full"),
            (KVCache(batch=3), "cache holds 3 rows"),
        ):  # fmt: skip
            cache = [KVCache(), KVCache(), third]
            with pytest.raises(ValueError, match=message):
                net(ids, cache=cache)
            assert not any(map(len, cache))
        net(ids[:, :12], cache=(cache := net.new_cache()))
        cache[0].truncate(9)
        with pytest.raises(ValueError, match=r"cache\[1\] must hold as many tokens as cache\[0\]"):
            net(ids[:, 12:], cache=cache)
        assert [len(t) for t in cache] == [9, 12, 12]
    with pytest.raises(ValueError, match="page_size must be an integer of at least 1, got None"):
        net.new_cache(max_length=40, batch=2, num_pages=9)


def test_pages_come_and_go():
    """What one sequence gives back, another takes; swaps and first copies move none."""
    decoder = Decoder(layer(), normal(2, 40, DIM), PagedKVCache(8, 10, 2, 64))
    cache = decoder.cache
    decoder.step(9, 25)
    assert cache.free_pages == 4
    table, places = cache.page_table.clone(), [t.data_ptr() for t in cache.tensors().values()]
    decoder.reorder(1, 0)
    assert torch.equal(cache.page_table, table.flip(0)) and cache.free_pages == 4
    assert [t.data_ptr() for t in cache.tensors().values()] == places
    for act, free in (
        (lambda: decoder.truncate(10, 9), 6),
        (lambda: decoder.step(3, 20), 4),
        (lambda: decoder.restart(0, 0), 6),
        (lambda: decoder.step(40, 0), 1),
        (lambda: decoder.truncate(17, 29), 3),
        (lambda: decoder.reorder(0, 0), 4),
        (lambda: decoder.step(5, 9), 3),
    ):
        act()
        tables = [row[: -(-n // 8)] for row, n in zip(cache.page_table, cache.lengths)]
        used = torch.cat(tables).tolist()
        assert len(set(used)) == len(used) <= cache.num_pages - free  # each page has one owner
        assert cache.free_pages == free
    decoder.truncate(17, 8)
    with pytest.raises(ValueError, match="cache is full: 9 pages needed"):
        cache.reorder([0, 0, 0, 0])
    decoder.step(1)
    with pytest.raises(ValueError, match="row 0 holds 18 of max_length=64 tokens, 47 more"):
        cache.reserve([47, 0])
    cache.reserve([7, 0])
    assert cache.free_pages == 4
    decoder.step(7, 0)
    cache.reset()
    assert cache.free_pages == 10 and not cache.page_table.any()


CHANGED = {
    "compress_block_sliding_stride": 8,
    "compress_block_size": 4,
    "branch_kv": "independent",
    "selection_stride": 1,
    # what the rankings were that a cache holds
    "num_selected_blocks": 1,
    "selection_block_size": 16,
    "num_initial_blocks": 1,
}


@pytest.mark.parametrize("make", [KVCache, lambda: PagedKVCache(16, 12, 2, 48)])
@pytest.mark.parametrize("name", CHANGED)
@torch.no_grad()
def test_another_geometry(name, make):
    """Named, and nothing is written."""
    cache, x, first = make(), normal(2, 13, DIM), layer(selection_stride=4)
    first(x[:, :9], cache=cache)
    message = f"{name}={getattr(first, name)!s}, this one has {name}={CHANGED[name]}"
    with pytest.raises(ValueError, match=re.escape(message)):
        layer(**{"selection_stride": 4, name: CHANGED[name]})(x[:, 9:], cache=cache)
    close(first(x[:, 9:], cache=cache), first(x)[:, 9:])


@pytest.mark.parametrize("name", list(CHANGED)[-3:])
@torch.no_grad()
def test_without_shared_rankings(name):
    x, module, cache = normal(1, 20, DIM), layer(), KVCache()
    module(x[:, :18], cache=cache)
    setattr(module, name, CHANGED[name])
    close(module(x[:, 18:], cache=cache), module(x)[:, 18:])


@pytest.mark.parametrize("make", [layer, lambda: Attention(DIM, 8, 4).double()])
@torch.no_grad()
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


@torch.no_grad()
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


@torch.no_grad()
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


# gradients of chunks through one cache and one backward for all, whatever is trained


CUTS = list(itertools.pairwise((0, 11, 12, 25)))
SPARSE = dict(attention_sinks=True)
NEED_NO_PAST = ["sinks", "compress_mem_kv", "to_strategy_combine", "combine_heads"]
TRAINED = [
    *NEED_NO_PAST, "k_intrablock_positions", "v_compress", "k_compress", "norm", "to_qkv", "",
]  # fmt: skip
CASES = [("default", name) for name in TRAINED]
CASES += itertools.product(
    ["shared rankings", "independent", "diff top-k", "probs"], ["sinks", "v_compress"]
)
CASES += [("dense", name) for name in ("to_q", "to_k", "to_v", "to_out", "")]


def train(module, name):
    """Train the parameters of that name alone."""
    module.requires_grad_(False)
    params = [p for key, p in module.named_parameters() if key.startswith(name)]
    return [p.requires_grad_(True) for p in params if p.numel()]


def gradients(outs, params):
    loss = sum(out.square().sum() for out in outs)
    return torch.autograd.grad(loss, params, materialize_grads=True)


def equal(actual, expected):
    torch.testing.assert_close(list(actual), list(expected), atol=1e-12, rtol=1e-10)


@pytest.mark.slow(one_of=3)
@caches
@pytest.mark.parametrize("setting, name", CASES)
def test_whatever_is_trained(setting, name, make):
    """The gradient of all chunks is the sum of each chunk's over a past held fixed; and that of one
    forward where the past needs none."""
    module = LAYERS["dense"]() if setting == "dense" else layer(**SETTINGS[setting], **SPARSE)
    x, cache, params = normal(2, 25, DIM), make(), train(module, name)
    actual = gradients([module(x[:, a:b], cache=cache) for a, b in CUTS], params)
    sums = [0] * len(params)
    for a, b in CUTS:
        cache = make()
        with torch.no_grad():
            for first, end in CUTS[: CUTS.index((a, b))]:
                module(x[:, first:end], cache=cache)
        grads = gradients([module(x[:, a:b], cache=cache)], params)
        sums = list(map(torch.add, grads, sums))
    assert any(grad.abs().max() > 0 for grad in actual)
    equal(actual, sums)
    if name in NEED_NO_PAST:
        equal(actual, gradients([module(x)], params))


@caches
def test_tokens_of_a_later_call(make):
    """Those of one forward, the past held fixed; padding, which holds anything at all, has none."""
    module, x = layer(**SPARSE), normal(2, 25, DIM)
    cache, leaf = make(), x[:, 16:].clone().requires_grad_()
    module(x[:, :16], cache=cache)
    whole = torch.cat((x[:, :16], leaf.detach()), dim=1).requires_grad_()
    (grad,) = gradients([module(leaf, cache=cache)], [leaf])
    equal([grad], [gradients([module(whole)[:, 16:]], [whole])[0][:, 16:]])
    grads = []
    for value in (0.0, float("nan")):
        padded, cache = x[:, :12].clone(), make()
        padded[0, 3:] = value
        padded.requires_grad_()
        outs = [module(padded, cache=cache, lengths=[3, 12]), module(x[:, :4], cache=cache)]
        grads.append(gradients(outs, [*module.parameters(), padded]))
        assert (grads[-1][-1][0, 3:] == 0).all()
    torch.testing.assert_close(*grads, atol=0.0, rtol=0.0)
