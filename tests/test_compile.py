"""torch.compile and torch.export: results and gradients of eager PyTorch, no graph breaks, and no
more graphs than forms of calls."""

import io

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from native_sparse_attention import KVCache, PagedKVCache, SparseAttention, Transformer
from native_sparse_attention.compress import MeanPool
from tests.helpers.budget import DEVICE
from tests.helpers.decoder import Decoder
from tests.helpers.layers import DIM, LAYERS, SETTINGS, SIZES, layer, normal, step
from tests.helpers.sizes import sizes


@pytest.fixture
def compiled():
    """A compiled module, one graph or an error; and how many graphs there are."""
    torch.compiler.reset()

    def compile(module, backend="eager", **settings):
        counter = CompileCounterWithBackend(backend)
        return torch.compile(module, backend=counter, **dict(fullgraph=True) | settings), counter

    yield compile
    torch.compiler.reset()


# what a layer is, and how it is called at n tokens
CALLS = {
    "plain": lambda n: {},
    "padded": lambda n: dict(mask=torch.arange(n)[None] > 2),
    "packed": lambda n: dict(cu_seqlens=torch.tensor([0, 4, n])),
    "ranking loss": lambda n: dict(ranking_queries=torch.tensor([9, 17, 19])),
    "ranking loss, packed": lambda n: CALLS["packed"](n) | CALLS["ranking loss"](n),
}
FORMS = [
    (SETTINGS["one softmax"], "packed"),
    (dict(branches=("window",)), "plain"),
    (dict(branches=("window",)), "padded"),
    (dict(importance="probs", use_diff_topk=True, attention_sinks=True), "plain"),
    (dict(causal=False, soft_cap=5.0, num_compressed_mem_kv=0, branch_kv="independent"), "plain"),
    (dict(branches=("selected", "window"), importance="index", qk_norm=True), "plain"),
    (SETTINGS["shared rankings, probs"], "padded"),
    (SETTINGS["default"], "packed"),
    (SETTINGS["learned ranking"], "ranking loss"),
    (SETTINGS["learned ranking"], "ranking loss, packed"),
    (dict(use_diff_topk=True, selection_stride=2), "plain"),
]


@pytest.mark.parametrize(
    "settings, call",
    [FORMS[0], *(pytest.param(*form, marks=pytest.mark.slow) for form in FORMS[1:])],
    ids=str,
)
def test_one_graph_for_any_length(settings, call, compiled):
    module = layer(torch.float32, **settings)
    # autograd's graph must foresee the strides of values that are padded by nothing
    backend = "aot_eager" if torch.cuda.is_available() or "loss" in call else "eager"
    run, counter = compiled(module, backend, dynamic=True)
    graphs = 0
    for n in (40, 57):
        x, given = torch.randn(1, n, DIM), CALLS[call](n)
        # in this order: the first call ever changes what einops knows, for which it compiles anew
        expected = step(module, x, **given)
        torch.testing.assert_close(step(module, x, run, **given), expected, atol=1e-4, rtol=1e-4)
        graphs = graphs or counter.frame_count  # dynamo may begin the first again
    assert counter.frame_count == graphs


@pytest.mark.slow
def test_a_training_step_is_one_graph(compiled):
    sparse = sizes(8, 4, 8, n=2, w=5)
    model = Transformer(16, DIM, 1, heads=2, use_sparse_attn=True, sparse_attn_kwargs=sparse)
    ids = torch.randint(16, (2, 33))
    expected = model(ids, return_loss=True)
    run, counter = compiled(model, "aot_eager")
    loss = run(ids, return_loss=True)
    loss.backward()
    assert counter.frame_count == 1
    torch.testing.assert_close(loss, expected)
    assert all(p.grad is not None for p in model.parameters())


@pytest.mark.slow(one_of=2)
@pytest.mark.parametrize("kind", ["shared rankings", "dense"])
@torch.no_grad()
def test_steps(kind, compiled):
    """One graph for all steps over a cache of fixed capacity, of any cache, whatever its sequences
    go through; a full cache writes nothing."""
    module = LAYERS[kind]()
    run, counter = compiled(module)
    for length in (9, 14):
        decoder = Decoder(module, normal(3, 48, DIM), KVCache(48, 2), rows=2)
        decoder.step(length, 5)
        decoder.run = run
        decoder.step(1, times=4)
    decoder.run = module
    decoder.corrupt(1, 3)
    decoder.truncate(17, 3)
    decoder.reorder(1, 0)
    decoder.restart(0, 2)
    decoder.run = run
    decoder.step(1, times=4)
    decoder.run = module
    decoder.step(0, 48 - decoder.place[1][1])
    before = decoder.cache.clone()
    with pytest.raises(ValueError, match="cache is full: row 1 holds 48 of max_length=48"):
        run(decoder.x[:2, :1].contiguous(), cache=decoder.cache)
    held = decoder.cache.tensors()
    for name, t in before.tensors().items():
        torch.testing.assert_close(held[name], t, rtol=0, atol=0, equal_nan=True)
    assert decoder.cache.lengths == before.lengths and counter.frame_count == 1


@pytest.mark.parametrize("kind", ["dense", pytest.param("one softmax", marks=pytest.mark.slow)])
@torch.no_grad()
def test_prefill_and_steps(kind, compiled):
    """From the first token on, `lengths` in a tensor: one graph that makes storage, and one. A long
    prompt of new sequences may have a graph of its own."""
    module = LAYERS[kind]()
    run, counter = compiled(module)
    for _ in range(2):
        decoder = Decoder(module, normal(2, 40, DIM), KVCache(48, 2), run=run)
        for counts in ((9, 4), (2, 9), (0, 3), (5, 5)):
            decoder.step(*counts, width=9 if counts != (9, 9) else 0)
    assert counter.frame_count == 2
    with pytest.raises(ValueError, match="lengths must be 2 integers between 0 and 9"):
        run(normal(2, 9, DIM), cache=decoder.cache, lengths=torch.tensor([10, 1]))
    assert decoder.cache.lengths == [16, 21]
    if kind != "dense":
        decoder = Decoder(module, normal(1, 1040, DIM), KVCache(1100, 1), run=run)
        decoder.step(1030)
        decoder.run = module
        decoder.step(1, times=3)


@pytest.mark.slow(one_of=4)
@pytest.mark.kernels
@pytest.mark.parametrize(
    "setting", ["shared rankings", "learned ranking", "one softmax, tokens", "biases and norms"]
)
def test_steps_by_the_decode_kernels(setting, compiled):
    """In the graph too, over storage that holds NaN behind the sequences."""
    module, nodes = layer(torch.float32, **SETTINGS[setting]).to(DEVICE), []

    def look(graph, inputs):
        nodes.append([str(node.target) for node in graph.graph.nodes])
        return graph.forward

    run = torch.compile(module, backend=look, fullgraph=True)
    module.backend = "eager"
    x = torch.randn(2, 30, DIM, device=DEVICE)
    decoder = Decoder(module, x, KVCache(48, 2), tol=1e-4)
    decoder.step(14)
    decoder.corrupt(16, 16)
    module.backend, decoder.run = "triton", run
    for counts in ((2, 0), (1, 2)):
        decoder.step(*counts, width=3)
    assert len(nodes) == 1 and any("decode_attention" in name for name in nodes[0])


def test_gradients_of_chunks(compiled):
    """Over a past that is held fixed, as outside of a compiled graph."""
    module = LAYERS["dense"]()
    run, _ = compiled(module)
    x, grads = normal(2, 20, DIM), []
    for call in (run, module):
        cache = KVCache(48, 2)
        with torch.no_grad():
            module(x[:, :11], cache=cache)
        outs = [call(x[:, a : a + 4].contiguous(), cache) for a in (11, 15)]
        loss = sum(out.square().sum() for out in outs)
        grads.append(torch.autograd.grad(loss, list(module.parameters())))
    torch.testing.assert_close(*grads, atol=1e-12, rtol=1e-10)


@pytest.mark.slow
@torch.no_grad()
def test_a_model_and_another_layers_cache(compiled):
    model = Transformer(40, 16, 2, dim_head=8, heads=2).eval()
    run, counter = compiled(model, fullgraph=False)
    ids = torch.randint(0, 40, (2, 24))
    expected, cache = model(ids), model.new_cache(max_length=32, batch=2)
    model(ids[:, :19], cache=cache)
    for t in range(19, 24):
        torch.testing.assert_close(run(ids[:, t : t + 1], cache=cache), expected[:, t : t + 1])
    assert counter.frame_count == 1
    with pytest.raises(ValueError, match="cache holds tokens of another layer"):
        run(ids[:, :1], cache=cache[::-1])
    assert [len(held) for held in cache] == [24, 24]


@torch.no_grad()
def test_other_caches_run_outside_of_the_graph(compiled):
    """Right, and nothing is compiled again; where one graph is asked for, it says what to use."""
    module = layer(branches=("window",))
    run, counter = compiled(module, fullgraph=False)
    for make in (KVCache, lambda: PagedKVCache(8, 12, 2, 48)):
        decoder = Decoder(module, normal(2, 34, DIM), make(), run=run)
        decoder.step(9)
        decoder.step(1, times=3)
        graphs = counter.frame_count
        decoder.step(1, times=22)
        assert counter.frame_count == graphs
    run, _ = compiled(module)
    with pytest.raises(torch._dynamo.exc.Unsupported, match="only a KVCache with max_length"):
        run(decoder.x[:, :1], decoder.cache)


BATCH, LENGTH = torch.export.Dim("batch", max=64), torch.export.Dim("length", max=4096)
EXPORTED = {
    "causal": dict(interpolated_importance_score=True, selection_stride=4, use_diff_topk=True),
    "both sides": dict(
        causal=False, importance="probs", num_compressed_mem_kv=0, soft_cap=5.0,
        branch_kv="independent", attention_sinks=True, compress_mlp=MeanPool(),
    ),
    "one softmax": dict(
        branches=("selected",), importance="head_max", ranking_bits=8, rank_rotated=True
    ),
    "index, dense at first": dict(branches=("selected",), importance="index", dense_length=16),
}  # fmt: skip
# torch 2.8 asks of a number of windows whether it is 0, in a network's product of matrices
if torch.__version__.startswith("2.8."):
    del EXPORTED["causal"]


def assert_exports(module, example, lengths, save=False):
    module.eval().requires_grad_(False)
    dims = ({0: BATCH, 1: LENGTH},)
    program = torch.export.export(module, (example(2, 40),), dynamic_shapes=dims)
    if save:
        file = io.BytesIO()
        torch.export.save(program, file)
        file.seek(0)
        program = torch.export.load(file)
    run = program.module()
    for batch, n in ((b, n) for b in (1, 3) for n in lengths):
        x = example(batch, n)
        torch.testing.assert_close(run(x), module(x))


@pytest.mark.slow(one_of=4)
@pytest.mark.parametrize("form", EXPORTED)
def test_exported_layer_of_any_length(form):
    module = SparseAttention(**SIZES | dict(causal=True) | EXPORTED[form])
    assert_exports(module, lambda b, n: torch.randn(b, n, DIM), (1, 2, 3, 4, 7, 8, 9, 41, 64))


@pytest.mark.slow(one_of=2)
# torch's own, as it loads
@pytest.mark.filterwarnings("ignore:The given buffer is not writable")
@pytest.mark.parametrize("sparse", [False, True])
def test_exported_transformer_is_saved_and_loaded(sparse):
    # torch 2.9 cannot load a program with a size that it computes
    save = not (sparse and torch.__version__.startswith("2.9."))
    model = Transformer(17, 16, 1, dim_head=8, heads=2, use_sparse_attn=sparse)
    assert_exports(model, lambda b, n: torch.randint(17, (b, n)), (2, 13, 70), save)
