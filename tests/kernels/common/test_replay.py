"""Calls that are recorded and repeated give what they give otherwise, bit for bit."""

import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from native_sparse_attention import KVCache, PagedKVCache, SparseAttention
from native_sparse_attention.compress import MeanPool
from tests.helpers.budget import DEVICE

pytest.importorskip("triton")

from native_sparse_attention.kernels.common import replay

pytestmark = pytest.mark.kernels
ROOT = Path(__file__).parents[3]

SETTINGS = {
    "plain": {},
    "gates": dict(use_diff_topk=True, importance="probs", attention_sinks=True),
    "independent": dict(branch_kv="independent", recompute=True, num_initial_blocks=1),
}


@pytest.fixture
def repeats(monkeypatch):
    """The lengths of the plans that were repeated, on the CPU too."""
    if len(replay.launchers()) < 2 and not torch.cuda.is_available():
        pytest.skip("Triton's interpreter is recorded from 3.6 on")
    token, lengths, own = replay.everywhere.set(True), [], replay.Plan.__call__

    def counted(self, inputs):
        lengths.append(len(self.steps))
        return own(self, inputs)

    monkeypatch.setattr(replay.Plan, "__call__", counted)
    with torch.autograd.set_multithreading_enabled(False):  # the variable is this thread's
        yield lengths
    replay.everywhere.reset(token)


def layer(**settings):
    torch.manual_seed(0)
    return SparseAttention(
        dim=32, dim_head=16, heads=2, kv_heads=1, sliding_window_size=5, compress_block_size=8,
        compress_block_sliding_stride=4, selection_block_size=8, num_selected_blocks=2,
        causal=True, compress_mlp=MeanPool(), backend="triton", **settings,
    ).to(DEVICE)  # fmt: skip


def results(module, x):
    x = x.clone().requires_grad_()
    out = module(x)
    grads = torch.autograd.grad(out.square().sum(), [x, *module.parameters()])
    return [out.detach(), *grads]


def as_written(monkeypatch, module, x):
    """The results without plans."""
    with monkeypatch.context() as patch:
        patch.setattr(replay, "is_possible", lambda tensor: False)
        return results(module, x)


@pytest.mark.slow(one_of=6)
@pytest.mark.parametrize("setting", SETTINGS)
def test_the_same_bits(setting, repeats, monkeypatch):
    module = layer(**SETTINGS[setting])
    for n in (21, 21, 21, 16, 21):
        x, before = torch.randn(1, n, 32, device=DEVICE), len(repeats)
        got = results(module, x)
        assert all(map(torch.equal, got, as_written(monkeypatch, module, x)))
    assert len(repeats) >= before + 3 > 3  # forward, the deltas of the backward, and its rest


CACHES = {
    "growing": KVCache,
    "fixed": lambda: KVCache(max_length=64),
    "paged": lambda batch=2: PagedKVCache(8, num_pages=16, batch=batch, max_length=64),
}


@pytest.mark.slow(one_of=6)
@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize("cache", CACHES.values(), ids=CACHES)
def test_steps_over_a_cache(cache, ragged, repeats, monkeypatch):
    """Writes of tokens and windows, and decode kernels, which write to some of their inputs."""
    module = layer(selection_stride=2).requires_grad_(False)
    x = torch.randn(2, 19, 32, device=DEVICE)

    def steps():
        held, found = cache(), []
        for first, last in [(0, 9), *((at, at + 2) for at in range(9, 19, 2))]:
            lengths = [last - first, last - first - 1] if ragged else None
            found.append(module(x[:, first:last], cache=held, lengths=lengths)[0])
        return found

    with monkeypatch.context() as patch:
        patch.setattr(replay, "is_possible", lambda tensor: False)
        expected = steps()
    assert not repeats
    for _ in range(2):
        assert all(map(torch.equal, steps(), expected))
    assert len(repeats) >= 5  # one of each step of the second time


ONE_SOFTMAX = dict(branches=("selected",), num_initial_blocks=1, attention_sinks=True)
RANKINGS = {
    "learned": dict(ONE_SOFTMAX, importance="index", rank_rotated=True),
    "rotated tokens": dict(ONE_SOFTMAX, importance="max", rank_rotated=True),
    "raw tokens": dict(ONE_SOFTMAX, importance="max"),
    "dense": dict(ONE_SOFTMAX, importance="index", dense_length=21),
    "means of three branches": dict(attention_sinks=True, compress_block_sliding_stride=4),
}
# of 7 steps those that are one plan: in others a network summarizes a window, or attention is dense
WHOLE = {"learned": 7, "rotated tokens": 7, "raw tokens": 0, "dense": 3}
WHOLE["means of three branches"] = 5


@pytest.mark.slow(one_of=12)
@pytest.mark.parametrize("cache", [KVCache, lambda: CACHES["paged"](1)], ids=["growing", "paged"])
@pytest.mark.parametrize("ranking", RANKINGS)
def test_layers_share_the_plan_of_a_step(ranking, cache, repeats, monkeypatch):
    """But none of its tensors: each has frequencies, sinks, weights and a cache of its own. A whole
    step is one plan, unless a network summarizes windows."""
    torch.manual_seed(0)
    settings = dict(compress_block_size=1, compress_block_sliding_stride=1) | RANKINGS[ranking]
    if "branches" not in settings:
        settings |= dict(compress_block_size=4, compress_mlp=MeanPool())
    layers = [
        SparseAttention(
            dim=32, dim_head=16, heads=4, kv_heads=2, sliding_window_size=5, rope_theta=theta,
            selection_block_size=8, num_selected_blocks=1, causal=True, backend="triton",
            **settings,
        ).to(DEVICE).requires_grad_(False)
        for theta in (1e4, 2.0)
    ]  # fmt: skip
    for module in layers:
        module.sinks.normal_()
    x = torch.randn(1, 24, 32, device=DEVICE)

    def steps():
        held = [cache() for _ in layers]
        found = [m(x[:, :17], cache=c)[0] for m, c in zip(layers, held, strict=True)]
        for at in range(17, 24):
            before = len(repeats)
            for module, store in zip(layers, held, strict=True):
                found.append(module(x[:, at : at + 1], cache=store)[0])
            counts.append(len(repeats) - before)
        return found

    counts, exact = [], []
    for module in layers:
        module.backend = "eager"
        exact.append(module(x))
        module.backend = "triton"
    with monkeypatch.context() as patch:
        patch.setattr(replay, "is_possible", lambda tensor: False)
        expected = steps()
    assert not repeats
    for at, whole in enumerate(exact):
        of_layer = torch.cat(expected[at :: len(layers)])
        torch.testing.assert_close(of_layer, whole[0], atol=1e-5, rtol=1e-4)
    for _ in range(2):
        counts.clear()
        assert all(map(torch.equal, steps(), expected))
    if ranking != "dense" or cache is KVCache:  # SDPA reads no pages
        assert counts.count(len(layers)) == WHOLE[ranking]


def test_dense_steps_are_of_no_graph():
    """They read as many keys as the host counts; steps past the length read what the device counts.
    The first step may be the first call of a cache, in pages too."""
    torch.manual_seed(0)
    settings = dict(ONE_SOFTMAX, compress_block_size=1, compress_block_sliding_stride=1)
    module = SparseAttention(
        dim=32, dim_head=16, heads=4, kv_heads=2, sliding_window_size=5, selection_block_size=8,
        num_selected_blocks=1, causal=True, importance="max", rank_rotated=True, dense_length=6,
        backend="triton", **settings,
    ).to(DEVICE).requires_grad_(False)  # fmt: skip
    x = torch.randn(2, 8, 32, device=DEVICE)
    module.sinks.normal_()
    module.backend = "eager"
    exact = module(x)
    module.backend = "triton"
    for cache in (KVCache(64, 2), CACHES["paged"]()):
        outs, counts = [], []
        for first, last in ((0, 5), (5, 6), (6, 7), (7, 8)):
            outs.append(module(x[:, first:last], cache=cache))
            counts.append(cache.counts_itself)
        torch.testing.assert_close(torch.cat(outs, dim=1), exact, atol=1e-5, rtol=1e-4)
        assert counts == [False, False, True, True]


@pytest.mark.gpu
def test_of_hopper(repeats, monkeypatch):
    """Kernels whose tensors come in descriptors, of another stream, and in a CUDA graph."""
    torch.manual_seed(0)
    module = SparseAttention(
        256, 128, 16, 256, 32, 64, 4, kv_heads=2, causal=True, compress_block_sliding_stride=16,
        compress_mlp=MeanPool(), backend="triton",
    ).to("cuda", torch.bfloat16)  # fmt: skip
    x = torch.randn(2, 2048, 256, device="cuda", dtype=torch.bfloat16)
    expected = as_written(monkeypatch, module, x)
    for _ in range(4):
        assert all(map(torch.equal, results(module, x), expected))
    other = torch.cuda.Stream()
    other.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(other):
        found = [results(module, x) for _ in range(3)]
        graph, before = torch.cuda.CUDAGraph(), len(repeats)
        with torch.no_grad(), torch.cuda.graph(graph, stream=other):
            out = module(x)
        out.zero_()
        graph.replay()
    torch.cuda.current_stream().wait_stream(other)
    assert len(repeats) > before
    assert all(torch.equal(*pair) for some in found for pair in zip(some, expected, strict=True))
    assert torch.equal(out, expected[0])


@pytest.mark.gpu
def test_side_by_side():
    """Threads that record at once: one does, the others run as ever, and launches are left as they
    were."""
    modules = [layer().requires_grad_(False) for _ in range(3)]
    x = torch.randn(1, 23, 32, device=DEVICE)
    expected = modules[0](x)
    own, found = replay.jit.JITFunction.run, []

    def work(module):
        found.extend(module(x) for _ in range(4))

    threads = [threading.Thread(target=work, args=(module,)) for module in modules]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 12 and all(torch.equal(out, expected) for out in found)
    assert replay.jit.JITFunction.run is own and not replay.ahead.one_at_a_time.locked()


def test_imported_while_launches_are_replaced():
    """As in the first call of an operator, which compiles its kernels ahead."""
    script = """
from native_sparse_attention.kernels.common import ahead
with ahead.without_launches():
    from native_sparse_attention.kernels.common import replay
import torch
replay.everywhere.set(True)
assert replay.is_possible(torch.ones(1))
"""
    subprocess.run([sys.executable, "-c", script], check=True, cwd=ROOT)


def test_what_cannot_be_repeated_runs_as_ever():
    calls = []

    def run(at):
        calls.append(at)
        return at.sum().item() * at

    repeated, t = replay.Repeated(run), torch.ones(3)
    for _ in range(4):
        assert torch.equal(repeated(t, [t], ()), 3 * t)
    assert len(calls) == 4 and list(repeated.plans.values()) == [False]


def test_not_recorded_while_another_thread_records():
    repeated, t = replay.Repeated(lambda at: at + 1), torch.ones(3)
    with replay.ahead.one_at_a_time:
        for _ in range(3):
            assert torch.equal(repeated(t, [t], ()), t + 1)
    assert list(repeated.plans.values()) == [None]
    for _ in range(2):
        assert torch.equal(repeated(t, [t], ()), t + 1)
    assert [type(plan) for plan in repeated.plans.values()] == [replay.Plan]
    assert not replay.ahead.one_at_a_time.locked()


def test_computations_views_and_buffers():
    """Of torch, between launches; with inputs that share their storage, and other strides."""

    def run(at):
        a, b = at
        room = a.new_empty(2, 3).zero_()
        room[:, 1:] += a[:, :2]
        return [room.t(), (room.view(-1)[2:4] * b.sum(), a.new_empty(0))]

    repeated = replay.Repeated(run)
    for _ in range(4):
        both = torch.randn(2, 8)
        for a, b in ((both[:, :3], both[:, 3:]), (both[:, 1:4], torch.randn(4))):
            got, expected = repeated((a, b), [a, b], ()), run((a, b))
            torch.testing.assert_close(got, expected, atol=0, rtol=0)
    assert [type(plan) for plan in repeated.plans.values()] == [replay.Plan] * 2


def test_without_an_interpreter(monkeypatch):
    """Before Triton 3.6 it has no `run` of its own, and without NumPy there is none."""
    monkeypatch.setitem(sys.modules, "triton.runtime.interpreter", None)
    assert replay.launchers() == [replay.jit.JITFunction]
    repeated, t = replay.Repeated(lambda at: at + 1), torch.ones(3)
    for _ in range(3):
        assert torch.equal(repeated(t, [t], ()), t + 1)
    assert [type(plan) for plan in repeated.plans.values()] == [replay.Plan]


def test_inputs_that_are_given_back_are_not_repeated():
    repeated, t = replay.Repeated(lambda at: [at[0], at[0] + 1]), torch.ones(3)
    for _ in range(3):
        assert repeated([t], [t], ())[0] is t


def test_memory_is_given_back_where_it_was():
    """A buffer that the call lets go of before the next is made is let go of by its plan."""

    def run(at):
        first = at.new_empty(1000).fill_(1.0)
        total = first.sum()
        del first
        second = at.new_empty(1000).fill_(2.0)
        return total + second.sum()

    repeated, t = replay.Repeated(run), torch.ones(3)
    for _ in range(2):
        repeated(t, [t], ())
    (plan,) = repeated.plans.values()
    names = [step.__qualname__.split(".")[1] for step in plan.steps]
    assert names.index("forget") < len(names) - 3
    assert repeated(t, [t], ()) == 3000


def test_few_plans_are_kept(monkeypatch):
    monkeypatch.setattr(replay, "MAX_PLANS", 3)
    repeated = replay.Repeated(lambda at: at + 1)
    for n in range(1, 9):
        t = torch.ones(n)
        assert torch.equal(repeated(t, [t], ()), t + 1)
    assert len(repeated.plans) <= 3
