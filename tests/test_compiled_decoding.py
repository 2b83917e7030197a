"""Decoding in a compiled graph: one graph for all steps, whatever rows hold, and the outputs of one
forward."""

import copy

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from native_sparse_attention import KVCache, PagedKVCache, Transformer
from native_sparse_attention.cache import tokens
from native_sparse_attention.transformer import Attention
from tests.helpers.budget import DEVICE
from tests.helpers.layers import DIM, SETTINGS, layer


def normal(*shape):
    return torch.randn(*shape, dtype=torch.float64)


def close(actual, expected):
    torch.testing.assert_close(actual, expected, atol=1e-12, rtol=1e-12)


@pytest.fixture
def compiled():
    """A compiled module, one graph or an error; and how many graphs there were."""
    torch.compiler.reset()

    def of(module, backend="eager", fullgraph=True):
        counter = CompileCounterWithBackend(backend)
        return torch.compile(module, backend=counter, fullgraph=fullgraph), counter

    yield of
    torch.compiler.reset()


class Decoder:
    """Rows of x that go on one token at a time, each from where it is."""

    def __init__(self, run, x, want, cache):
        self.run, self.x, self.want, self.cache = run, x, want, cache
        self.at = [(row, 0) for row in range(len(x))]  # which row of x, and its next token

    def step(self, times=1):
        for _ in range(times):
            out = self.run(torch.stack([self.x[r, n : n + 1] for r, n in self.at]), self.cache)
            for row, (r, n) in enumerate(self.at):
                close(out[row], self.want[r, n : n + 1])
            self.at = [(r, n + 1) for r, n in self.at]
        assert self.cache.lengths == [n for _, n in self.at]


@pytest.mark.slow(one_of=2)
@pytest.mark.parametrize(
    "module", [layer(**SETTINGS["shared rankings"]), Attention(DIM, 8, 4, kv_heads=2).double()]
)
def test_one_graph_for_all_steps(module, compiled):
    """After an eager prefill of rows of different lengths; rows are taken back, start anew after
    they went wrong, and change places; another cache follows, and another sequence in it."""
    run, counter = compiled(module)
    x = normal(2, 40, DIM)
    with torch.no_grad():
        want = module(x)
        for length in (9, 14):
            decoder = Decoder(run, x, want, KVCache(48, 2))
            module(x[:, :19], cache=decoder.cache, lengths=[length, 5])
            decoder.at = [(0, length), (1, 5)]
            decoder.step(9)
        cache = decoder.cache
        for t in range(23, 25):
            close(module(x[:1, t : t + 1].expand(2, -1, -1), cache=cache)[0], want[0, t : t + 1])
        cache.truncate([24, 3])
        decoder.at = [(0, 24), (1, 3)]
        decoder.step(2)
        run(torch.full((2, 1, DIM), float("nan"), dtype=torch.float64), cache)
        cache.truncate([26, 0])
        cache.reorder([1, 0])
        decoder.at = [(1, 0), (0, 26)]
        decoder.step(2)
        copy = cache.clone()
        decoder.step(2)
        decoder.cache, decoder.at = copy, [(1, 2), (0, 28)]
        decoder.step(6)
        assert counter.frame_count == 1

        # full: nothing is written
        decoder.cache = KVCache(48, 2)
        module(torch.cat((x, x), 1)[:, :47], cache=decoder.cache)
        run(x[:, :1].contiguous(), decoder.cache)
        before = decoder.cache.clone()
        with pytest.raises(ValueError, match="cache is full: row 0 holds 48 of max_length=48"):
            run(x[:, :1].contiguous(), decoder.cache)
        assert decoder.cache.lengths == [48, 48]
        after = decoder.cache.tensors()
        assert all(torch.equal(t, after[name]) for name, t in before.tensors().items())
        assert counter.frame_count == 1


@pytest.mark.slow(one_of=4)
@pytest.mark.kernels
@pytest.mark.parametrize(
    "setting", ["shared rankings", "learned ranking", "one softmax, tokens", "biases and norms"]
)
@torch.no_grad()
def test_steps_by_the_decode_kernels(setting):
    """In the graph too, over storage that holds NaN behind the rows."""
    module, found = layer(torch.float32, **SETTINGS[setting]).to(DEVICE), []

    def look(graph, inputs):
        found.append([str(node.target) for node in graph.graph.nodes])
        return graph.forward

    torch.compiler.reset()
    run = torch.compile(module, backend=look, fullgraph=True)
    x, cache = torch.randn(2, 30, DIM, device=DEVICE), KVCache(48, 2)
    module.backend = "eager"
    want = module(x)
    module(torch.cat((x[:, :14], torch.full_like(x, float("nan"))), 1), cache=cache)
    cache.truncate([14, 14])
    module.backend = "triton"
    rows = torch.arange(2, device=DEVICE)
    for counts in ([3, 0], [2, 3], [1, 2]):
        at = torch.tensor(cache.lengths, device=DEVICE)
        inp = x[rows[:, None], at[:, None] + torch.arange(3, device=DEVICE)]
        out = run(inp, cache, lengths=torch.tensor(counts, device=DEVICE))
        for row, n in enumerate(counts):
            start = int(at[row])
            torch.testing.assert_close(out[row, :n], want[row, start : start + n])
            assert (out[row, n:] == 0).all()
    assert len(found) == 1
    assert any("decode_attention" in name for name in found[0])


def test_prefill_and_steps_of_rows_that_take_fewer(compiled):
    """All in compiled graphs, from the first token on; `lengths` in a tensor."""
    module = Attention(DIM, 8, 4, kv_heads=2).double()
    run, counter = compiled(module)
    x = normal(2, 40, DIM)
    with torch.no_grad():
        want = module(x)
        for _ in range(2):
            cache, done = KVCache(48, 2), [0, 0]
            for counts in ([9, 4], [2, 9], [0, 3], [5, 5]):
                inp = torch.full((2, 9, DIM), float("nan"), dtype=torch.float64)
                for row, n in enumerate(counts):
                    inp[row, :n] = x[row, done[row] : done[row] + n]
                out = run(inp, cache, lengths=torch.tensor(counts, dtype=torch.int32))
                for row, n in enumerate(counts):
                    close(out[row, :n], want[row, done[row] : done[row] + n])
                    assert (out[row, n:] == 0).all()
                    done[row] += n
            assert cache.lengths == done == [16, 21]
        assert counter.frame_count == 2  # with storage to make, and with storage that is there
        with pytest.raises(ValueError, match="lengths must be 2 integers between 0 and 9"):
            run(inp, cache, lengths=torch.tensor([10, 1], dtype=torch.int32))
        assert cache.lengths == done


@pytest.mark.parametrize(
    "setting",
    [
        pytest.param(name, marks=[] if name == "one softmax" else pytest.mark.slow)
        for name in sorted(SETTINGS)
    ],
)
@torch.no_grad()
def test_first_tokens_of_a_cache(setting, compiled, monkeypatch):
    """Of new sequences, or of those that start anew, the call has a graph of its own, in which no
    kernel takes offsets: it is the call without a cache. Others go on after it."""
    monkeypatch.setattr(tokens, "FIRST_GRAPH", 20)
    module, starts = layer(**SETTINGS[setting]), []
    run, counter = compiled(module)
    x, attend = normal(2, 40, DIM), module.attend
    want = module(x)
    module.attend = lambda *args, **given: (
        starts.append(given["q_offset"]) or attend(*args, **given)
    )
    cache, counts = KVCache(48, 2), [20, 14]
    out = run(x[:, :20].contiguous(), cache, lengths=torch.tensor(counts))
    for row, n in enumerate(counts):
        close(out[row, :n], want[row, :n])
        assert (out[row, n:] == 0).all()
    assert cache.lengths == counts
    out = module(torch.stack([x[r, n : n + 9] for r, n in enumerate(counts)]), cache=cache)
    for row, n in enumerate(counts):
        close(out[row], want[row, n : n + 9])
    cache.reset()
    out = [run(part.contiguous(), cache) for part in x.split(20, dim=1)]
    close(torch.cat(out, dim=1), want)
    assert counter.frame_count == 3
    assert [starts[0], starts[2]] == [0, 0] and isinstance(starts[3], torch.Tensor)


# a variable of the module: torch checks no aliasing between those and arguments
FIRST = None


def test_settings_of_one_of_two_layers(compiled, monkeypatch):
    """Equal ones, one a variable of the module and one an argument."""
    first, second = (layer(**SETTINGS["one softmax"]) for _ in range(2))
    monkeypatch.setitem(globals(), "FIRST", first)
    run, counter = compiled(lambda module, x: FIRST(x) + module(x))
    x = normal(1, 40, DIM)
    with torch.no_grad():
        close(run(second, x), first(x) + second(x))
        second.num_selected_blocks = 1
        close(run(second, x), first(x) + second(x))
    assert counter.frame_count == 2


@torch.no_grad()
def test_first_tokens_of_caches_that_are_shared_or_exported(compiled, monkeypatch):
    """A copy counts on the device what the other one does not see, and an exported program has no
    guards: both attend at any lengths."""
    monkeypatch.setattr(tokens, "FIRST_GRAPH", 8)
    module = Attention(DIM, 8, 4, kv_heads=2).double()
    x = normal(2, 32, DIM)
    want, parts = module(x), [part.contiguous() for part in x.split(16, dim=1)]
    run, counter = compiled(module)
    cache = KVCache(48, 2)
    module(x[:, :1], cache=cache)
    cache.reset()
    assert cache.clone().is_new and cache.is_new
    shared = copy.copy(cache)
    for held, part, expected in zip((shared, cache), parts, want.split(16, dim=1), strict=True):
        close(run(part, held), expected)
    assert cache.lengths == shared.lengths == [32, 32] and counter.frame_count == 1

    class Prefill(torch.nn.Module):
        def forward(self, x):
            return module(x, cache=cache)

    masks, attend = [], module.attend
    module.attend = lambda q, k, v, mask: masks.append(mask) or attend(q, k, v, mask)
    cache.reset()
    close(torch.cat([run(part, cache) for part in parts], dim=1), want)
    assert masks[0] is None and isinstance(masks[1], torch.Tensor)
    module.attend = attend

    cache.reset()
    program = torch.export.export(Prefill(), (parts[0],), strict=False).module()
    cache.reset()
    close(torch.cat([program(part) for part in parts], dim=1), want)


def test_gradients(compiled):
    """Of a chunk, over a past that is held fixed, as outside of a compiled graph."""
    module = Attention(DIM, 8, 4, kv_heads=2).double()
    run, _ = compiled(module, "aot_eager")
    x, grads = normal(2, 20, DIM), []
    for call in (run, module):
        cache = KVCache(48, 2)
        with torch.no_grad():
            module(x[:, :11], cache=cache)
        outs = [call(x[:, 11:15].contiguous(), cache), call(x[:, 15:19].contiguous(), cache)]
        loss = sum(out.square().sum() for out in outs)
        grads.append(torch.autograd.grad(loss, list(module.parameters())))
    torch.testing.assert_close(*grads, atol=1e-12, rtol=1e-10)


def test_a_model_and_another_layers_cache(compiled):
    model = Transformer(40, 16, 2, dim_head=8, heads=2).eval()
    run, counter = compiled(model)
    ids = torch.randint(0, 40, (2, 30))
    with torch.no_grad():
        want, cache = model(ids), model.new_cache(max_length=32, batch=2)
        model(ids[:, :19], cache=cache)
        for t in range(19, 30):
            torch.testing.assert_close(run(ids[:, t : t + 1], cache=cache), want[:, t : t + 1])
        assert counter.frame_count == 1
        other = model.new_cache(max_length=32, batch=2)
        model(ids[:, :19], cache=other)
        run, _ = compiled(model, fullgraph=False)
        with pytest.raises(ValueError, match="cache holds tokens of another layer"):
            run(ids[:, 19:20], cache=other[::-1])
        assert [len(held) for held in other] == [19, 19]


@pytest.mark.parametrize("make", [KVCache, lambda: PagedKVCache(8, 12, 2, 48)])
def test_other_caches_run_outside_of_the_graph(make, compiled):
    """Right, and nothing is compiled again; where one graph is asked for, it says what to use."""
    module, x = layer(), normal(2, 34, DIM)
    run, counter = compiled(module, fullgraph=False)
    with torch.no_grad():
        want, cache = module(x), make()
        close(run(x[:, :9], cache), want[:, :9])
        for t in range(9, 12):
            close(run(x[:, t : t + 1], cache), want[:, t : t + 1])
        graphs = counter.frame_count
        for t in range(12, 34):
            close(run(x[:, t : t + 1], cache), want[:, t : t + 1])
        assert counter.frame_count == graphs
        run, _ = compiled(module)
        with pytest.raises(torch._dynamo.exc.Unsupported, match="only a KVCache with max_length"):
            run(x[:, :1], cache)


def test_what_a_compiled_step_knows_of_lengths(monkeypatch):
    """Where every sequence has `dense_length` tokens it takes the decode kernels."""
    settings = SETTINGS["one softmax, tokens"] | dict(dense_length=16)
    module, x = layer(**settings), normal(2, 30, DIM)

    def least(cache):
        with monkeypatch.context() as patch:
            patch.setattr(torch.compiler, "is_compiling", lambda: True)
            return module.dense_below(cache)

    for steps in (1, 8):
        cache = KVCache(max_length=32)
        assert least(cache) == 16
        for part in x[:, :24].split(24 // steps, dim=1):
            module(part, cache=cache)
        assert least(cache) == 0 and least(cache.clone()) == 0
        module.dense_length = 28
        assert least(cache) == 28
        module.dense_length = 16
        cache.reset([1])
        assert least(cache) == 16
        module(x[:, :20], cache=cache, lengths=[0, 15])
        assert least(cache) == 16
        module(x[:, :1], cache=cache)
        assert least(cache) == 0
