"""`collect` records what layers read, and changes nothing."""

import pytest
import torch
from torch import nn

import native_sparse_attention as nsa
from native_sparse_attention import KVCache, Transformer, collect
from native_sparse_attention.view import collector
from tests.helpers.layers import DIM, SETTINGS, layer
from tests.helpers.sizes import sizes

CASES = [(name, causal) for name in SETTINGS for causal in (True, False)]
case = pytest.mark.parametrize(
    ("name", "causal"), CASES, ids=[f"{n}, {'causal' if c else 'both ways'}" for n, c in CASES]
)


def made(name, causal=True, **settings):
    torch.manual_seed(1)
    return layer(torch.float32, **SETTINGS[name] | settings, causal=causal)


def tokens(n=61, b=2, seed=2):
    return torch.randn(b, n, DIM, generator=torch.Generator().manual_seed(seed))


def read(module, x, queries=None, **kwargs):
    """The reading of one call of one layer."""
    with collect(module, queries) as seen:
        module(x, **kwargs)
    (reading,) = seen.forward()
    return reading


def full_attention(module, x, window=False):
    """Probabilities [b i h j] of full attention, in float64."""
    calls = []
    module.observer = lambda call, config, indices: calls.append((call, config))
    module(x)
    del module.observer
    ((call, config),) = calls
    call = call.branch("window" if window else "selected", config.branches)
    q, k = call.q.double(), call.k.double()
    k = k.repeat_interleave(module.heads // module.kv_heads, dim=2)
    logits = torch.einsum("bihd,bjhd->bhij", q, k) * module.dim_head**-0.5
    if module.soft_cap is not None:
        logits = module.soft_cap * (logits / module.soft_cap).tanh()
    if module.causal:
        logits = logits.masked_fill(torch.ones_like(logits).triu(1).bool(), float("-inf"))
    return logits.softmax(dim=-1).transpose(1, 2)


def grads(module, out, x):
    return torch.autograd.grad(out.sum(), [x, *module.parameters()], allow_unused=True)


def assert_blocks(module, x, reading):
    """Those that the layer returns, each once, with the forced ones."""
    length = x.shape[1]
    n, i, l = module.num_selected_blocks, module.num_initial_blocks, module.num_local_blocks
    ranks = module.kv_heads if module.query_heads_share_selected_kv else module.heads
    assert reading.blocks.shape == (2, length, ranks, len(reading.kinds))
    if reading.ranked.shape[-1] and length:
        _, ranked = module(x, return_block_indices=True)
        ranked = ranked.masked_fill(reading.dense[..., None, None], -1)
        assert torch.equal(reading.ranked, ranked)
        assert torch.equal(reading.scores.isnan(), ranked < 0)
    query_block = [t // module.selection_block_size for t in range(length)]
    for t, c in enumerate(query_block):
        first = c if module.causal else (length - 1) // module.selection_block_size
        initial = set(range(min(i, first + 1)))
        local = set(range(max(i, c - l + 1), c + 1)) if module.causal else set()
        if reading.dense[0, t]:
            initial = local = set()
        assert set(reading.initial[0, t, 0].tolist()) - {-1} == initial
        assert set(reading.local[0, t, 0].tolist()) - {-1} == local
    for chosen in reading.blocks.flatten(0, 2).tolist():
        chosen = [c for c in chosen if c >= 0]
        assert len(set(chosen)) == len(chosen) <= n + i + l


def assert_agreement(module, reading):
    """The share of common blocks, 1 among tokens that share a ranking."""
    ranked, b = reading.ranked, 1
    for r in range(ranked.shape[2]):
        previous = set()
        for t in range(ranked.shape[1]):
            blocks = set(ranked[b, t, r].tolist()) - {-1}
            share = reading.agreement[b, t, r]
            if not blocks or not previous or reading.dense[b, t - 1]:
                assert share.isnan()
            else:
                assert share == pytest.approx(len(blocks & previous) / len(blocks))
                assert t % module.selection_stride == 0 or share == 1
            previous = blocks


def assert_mass(module, x, reading):
    """That of full attention, with a soft cap and without sinks."""
    at, s, close = torch.arange(x.shape[1]), module.selection_block_size, dict(atol=1e-5, rtol=1e-5)
    if reading.blocks is not None:
        probs = full_attention(module, x)
        slots = reading.blocks.repeat_interleave(module.heads // reading.blocks.shape[2], 2)
        for slot in range(slots.shape[-1]):
            expected = (probs * (slots[..., slot, None] == at // s)).sum(dim=-1)
            torch.testing.assert_close(reading.block_mass[..., slot].double(), expected, **close)
        total = reading.block_mass.sum(dim=-1)
        dense = reading.dense[..., None].expand_as(total)
        torch.testing.assert_close(reading.mass, total.masked_fill(dense, 1.0))
        assert (reading.mass < 1 + 1e-5).all()
    if "window" in module.branches:
        inside = (at - at[:, None]).abs() <= module.sliding_window_size
        expected = (full_attention(module, x, window=True) * inside[:, None]).sum(dim=-1)
        torch.testing.assert_close(reading.window_mass.double(), expected, **close)


@pytest.mark.slow(one_of=2)
@case
def test_reading(name, causal):
    """It changes no output and no gradient, draws no number, and holds what the layer reads."""
    module, x = made(name, causal), (3 * tokens()).requires_grad_()
    out, random = module(x), torch.get_rng_state()
    with collect(module, None) as seen:
        recorded = module(x)
    assert torch.equal(random, torch.get_rng_state())
    assert torch.equal(out, recorded) and "observer" not in vars(module)
    for one, other in zip(grads(module, out, x), grads(module, recorded, x)):
        assert one is other is None or torch.equal(one, other)
    (reading,) = seen.forward()
    assert (reading.window_mass is None) == ("window" not in module.branches)
    if reading.gates is None:
        assert len(module.branches) == 1
    else:
        assert torch.equal(reading.gates, module.to_strategy_combine(module.norm(x)))
        assert reading.gates.shape[-1] == len(module.branches)
    if "selected" in module.branches:
        n, i, l = module.num_selected_blocks, module.num_initial_blocks, module.num_local_blocks
        kinds = ("initial",) * i + ("ranked",) * n + ("local",) * (l if causal else 0)
        assert reading.kinds == kinds
        assert_blocks(module, x.detach(), reading)
        assert_agreement(module, reading)
    else:
        names = ("blocks", "scores", "block_mass", "mass", "agreement")
        assert all(getattr(reading, name) is None for name in names)
    assert_mass(module, x.detach(), reading)


@pytest.mark.slow(one_of=6)
@pytest.mark.parametrize("length", [0, 1, 3, 7, 8, 9, 17])
@pytest.mark.parametrize("causal", [True, False])
def test_short_sequences(length, causal):
    for name in SETTINGS:
        module, x = made(name, causal), tokens(max(1, length))[:, :length]
        reading = read(module, x)
        assert reading.positions.shape == (2, length)
        if reading.blocks is not None:
            assert_blocks(module, x, reading)
        if length:
            assert_mass(module, x, reading)


@pytest.mark.parametrize(
    "name", ["default", "probs", "own rankings", "shared rankings", "interpolated", "no memory",
             "one softmax, tokens", "learned ranking of windows"],
)  # fmt: skip
@pytest.mark.parametrize("causal", [True, False])
def test_scores_decide_the_ranking(name, causal):
    """The scores of two ranked blocks are the largest two of a ranking of all blocks, which hold
    all mass."""
    module, x = made(name, causal), tokens()
    whole = layer(torch.float32, **SETTINGS[name] | dict(num_selected_blocks=10), causal=causal)
    whole.load_state_dict(module.state_dict())
    reading, ordered = read(module, x), read(whole, x)
    there = ordered.scores.nan_to_num(float("-inf"))
    assert (there[..., :-1] >= there[..., 1:] - 1e-6).all()
    torch.testing.assert_close(reading.scores, ordered.scores[..., :2], equal_nan=True)
    assert not ordered.dense.any()
    torch.testing.assert_close(ordered.mass, torch.ones_like(ordered.mass))


SMALL = sizes(4, 2, 4, n=2, w=4)


def small_model(**kwargs):
    torch.manual_seed(0)
    settings = dict(depth=2, dim_head=4, heads=2, sparse_attn_kwargs=SMALL) | kwargs
    return Transformer(11, 16, use_sparse_attn=True, **settings)


IDS = torch.randint(0, 11, (2, 40), generator=torch.Generator().manual_seed(0))
FIRST, SECOND = "layers.0.0", "layers.1.0"


def test_agreement_of_layers():
    model = small_model(depth=3)
    with collect(model) as seen:
        model(IDS)
    agreement = seen.agreement()
    assert agreement.shape == (3, 3) and (agreement.diagonal() == 1).all()
    one, other = (reading.ranked.flatten(2) for reading in seen.forward()[1:])
    shares = []
    for these, those in zip(one.flatten(0, 1).tolist(), other.flatten(0, 1).tolist()):
        these, those = set(these) - {-1}, set(those) - {-1}
        if these and those:
            shares.append(len(these & those) / len(these))
    assert agreement[1, 2].item() == pytest.approx(sum(shares) / len(shares), abs=1e-6)
    # a layer that ranks nothing agrees with none
    model = small_model(sparse_attn_kwargs=SMALL | SETTINGS["one softmax"])
    model.layers[1][0].dense = True
    with collect(model) as seen:
        model(IDS)
    agreement = seen.agreement()
    assert agreement[0, 0] == 1 and agreement.isnan().sum() == 3


NUMBERS = ("blocks", "scores", "block_mass", "mass", "window_mass", "gates", "agreement", "dense")


def same(one, other):
    """Whether two readings hold the same numbers."""
    pairs = [(getattr(one, name), getattr(other, name)) for name in ("positions", *NUMBERS)]
    return all(a is b is None or a.nan_to_num(-7).equal(b.nan_to_num(-7)) for a, b in pairs)


def assert_rows(reading, at, other):
    """Rows `at` are the other reading; products of fewer queries may sum in another order."""
    for name in set(NUMBERS) - {"block_mass"}:  # of as many slots as the longest document has
        one, rows = getattr(other, name), getattr(reading, name)
        assert (one is None) == (rows is None)
        if one is not None:
            torch.testing.assert_close(rows[:, at], one, equal_nan=True, atol=1e-5, rtol=1e-5)


def test_several_forwards_and_layers():
    model = small_model()
    with collect(model, queries=8) as seen:
        assert list(seen) == [FIRST, SECOND] and len(seen) == 2
        model(IDS)
        model(IDS[:1, :20])
        assert [len(held) for held in seen.values()] == [2, 2]
        first, second = seen[FIRST]
        assert first.positions.shape == (2, 8) and second.positions.shape == (1, 8)
        assert torch.equal(first.positions, seen[SECOND][0].positions)
        assert (first.layer, first.length) == (FIRST, 40)
        seen.clear()
        model(IDS)
    assert same(seen[FIRST][0], first)
    model(IDS)
    assert len(seen[FIRST]) == 1
    with collect(model, layers=[1]) as by_number:
        assert model.layers[0][0].observer is None
        with pytest.raises(ValueError, match="another collect records: 'layers.1.0'"):
            collect(model).__enter__()
    with collect(model, layers=[SECOND]) as by_name:
        model(IDS)
    assert list(by_number) == list(by_name) == [SECOND]


def test_sampled_queries_are_rows_of_all(monkeypatch):
    module, x = made("paper"), tokens()
    every, some = read(module, x), read(module, x, queries=9)
    at = some.positions[0]
    assert at.tolist() == sorted(set(at.tolist())) and len(at) == 9
    assert_rows(every, at, some)
    assert same(some, read(module, x, queries=9))
    assert same(some, read(module, x, queries=at))
    with collect(module, 9, seed=1) as seen:
        module(x)
    assert not torch.equal(seen.forward()[0].positions, some.positions)
    held = [t for t in vars(some).values() if isinstance(t, torch.Tensor)]
    assert all(t.device.type == "cpu" and not t.requires_grad for t in held)
    assert all(t.untyped_storage().nbytes() == t.nbytes for t in held)
    monkeypatch.setattr(collector, "MOST_SCORES", 1500)  # three queries at a time
    pieces = read(module, x)
    torch.testing.assert_close(pieces.mass, every.mass)
    torch.testing.assert_close(pieces.scores, every.scores, equal_nan=True)


@pytest.mark.parametrize("name", ["paper", "shared rankings", "one softmax, shared rankings",
                                  "learned ranking", "window alone"])  # fmt: skip
def test_packed_documents_are_read_as_each_alone(name):
    module, x = made(name), tokens(b=1)
    packed = read(module, x, cu_seqlens=torch.tensor([0, 24, 61]))
    for number, (start, stop) in enumerate([(0, 24), (24, 61)]):
        alone = read(module, x[:, start:stop])
        rows = packed.documents[0] == number
        assert torch.equal(packed.positions[:, rows], alone.positions)
        assert_rows(packed, rows, alone)


def test_padding_has_no_numbers():
    module, x = made("paper"), tokens()
    mask = torch.arange(61).expand(2, -1) >= torch.tensor([[0], [20]])
    padded, alone = read(module, x, mask=mask), read(module, x[1:, 20:])
    there = padded.positions[1] >= 0
    assert there.sum() == 41
    torch.testing.assert_close(padded.mass[1:, there], alone.mass)
    assert padded.mass[1, ~there].isnan().all() and padded.gates[1, ~there].isnan().all()
    assert (padded.blocks[1, ~there] == -1).all() and not padded.dense[1, ~there].any()


def test_dense_layers_and_dense_queries():
    module = made("one softmax")
    module.dense = True
    reading = read(module, tokens())
    assert reading.dense.all() and (reading.mass == 1).all()
    assert (reading.blocks == -1).all() and reading.scores is None
    reading = read(made("one softmax, shared rankings"), tokens())
    assert reading.dense[0].tolist() == [t < 12 for t in range(61)]


def test_checkpointing_in_distributed_training_records_once(tmp_path):
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        model = nn.parallel.DistributedDataParallel(small_model(activation_checkpointing=True))
        with torch.autocast("cpu", torch.bfloat16), collect(model, queries=5) as seen:
            model(IDS, return_loss=True).backward()
        assert [len(held) for held in seen.values()] == [1, 1]
        reading = seen.forward()[0]
        assert reading.mass.dtype == reading.gates.dtype == torch.float32
        del model  # it holds the process group, whose threads may then wait for Python for ever
    finally:
        torch.distributed.destroy_process_group()


def test_a_compiled_model_is_recorded():
    module, x = made("window alone"), tokens(8, 1)
    program = torch.compile(module, backend="eager")
    program(x)
    with collect(program) as seen:
        assert torch.equal(program(x), module(x))
    assert len(seen.forward()) == 1 and list(seen) == ["_orig_mod"]
    program(x)
    assert same(*seen["_orig_mod"])  # of the program and of the module


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["default", "probs", "one softmax"])
def test_layers_are_seen_on_a_gpu(name):
    settings = dict(dim=256, dim_head=64, heads=8, kv_heads=2, compress_block_size=32,
                    compress_block_sliding_stride=16, selection_block_size=64,
                    sliding_window_size=64, compress_mlp=None)  # fmt: skip
    settings |= {} if name == "one softmax" else {"compress_mlp": nsa.compress.MeanPool()}
    settings = settings | SETTINGS[name]
    module = layer(torch.bfloat16, **settings).cuda()
    x = torch.randn(2, 1000, 256, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    expected = grads(module, out := module(x), x)
    with collect(module, 32) as seen:
        recorded = module(x)
    assert torch.equal(recorded, out)
    assert all(torch.equal(a, b) for a, b in zip(expected, grads(module, recorded, x)))
    reading = seen.forward()[0]
    assert torch.equal(reading.blocks, read(module, x, queries=32).blocks)
    assert reading.mass.min() > 0 and reading.mass.max() < 1.0001


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        (dict(queries=0), "queries must be an integer of at least 1, got 0"),
        (dict(seed=-1), "seed must be an integer of at least 0, got -1"),
        *(
            (dict(layers=layers), "layers must be a list of names of layers")
            for layers in ([2], ["norm"], "layers.0.0", [], [True], [0.0], [torch.ones(2)])
        ),
        (dict(model=3), "must be an nn.Module, got 3"),
        (dict(model=nn.Linear(2, 2)), "got none in a Linear"),
    ],
)
def test_bad_arguments(kwargs, message):
    with pytest.raises(ValueError, match=message), collect(**dict(model=small_model()) | kwargs):
        pass


def test_refused_calls():
    model, module, x = small_model(), made("default"), tokens()
    for queries, told in (
        (torch.tensor([50]), "queries must be positions from 0 to 39, got .50."),
        (torch.tensor([-1]), "queries must be positions from 0 to 39, got .-1."),
        (torch.rand(3), "queries must be .m. integers, got a torch.float32 tensor"),
    ):
        with collect(model, queries) as seen, pytest.raises(ValueError, match=told):
            model(IDS)
        with pytest.raises(ValueError, match="every layer must have had a call, got none of"):
            seen.forward()
    with collect(model) as seen, collect(module):
        for decode in (
            lambda: model(IDS, cache=model.new_cache()),
            lambda: model.sample(IDS, 45),
            lambda: module(x, cache=KVCache()),
        ):
            with pytest.raises(NotImplementedError, match="leave out the cache"):
                decode()
        assert not any(seen.values())
        module(x)
    assert module.observer is None
