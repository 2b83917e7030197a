"""The layer from its projection to its output as one node, against its operators one by one."""

import copy
import functools
import gc
import weakref

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from native_sparse_attention import KVCache, SparseAttention, collect
from native_sparse_attention.compress import AttentionPool, MeanPool
from native_sparse_attention.ops.triton import layer as operators
from native_sparse_attention.ops.triton import projected
from tests.helpers.budget import CUDA, DEVICE

pytest.importorskip("triton")

from native_sparse_attention.kernels.common import replay

pytestmark = pytest.mark.kernels

SETTINGS = {
    "plain": {},
    "no memory": dict(num_compressed_mem_kv=0, num_initial_blocks=1, num_local_blocks=2),
    "gates and sinks": dict(use_diff_topk=True, importance="probs", attention_sinks=True),
    "recompute": dict(recompute=True, soft_cap=4.0),
    "not causal": dict(causal=False),
    "one ranking for two": dict(selection_stride=2, query_heads_share_selected_kv=False),
}


class Halved(MeanPool):
    """Of another forward: a subclass is not taken for the means that a kernel forms."""

    def forward(self, windows):
        return super().forward(windows) / 2


@pytest.fixture
def nodes(monkeypatch):
    """The passes of the node, on the CPU too."""
    if len(replay.launchers()) < 2 and not CUDA:
        pytest.skip("Triton's interpreter is recorded from 3.6 on")
    token, seen = replay.everywhere.set(True), []
    own = projected.ProjectedAttention.backward

    def backward(ctx, *grads):
        seen.append("backward")
        return own(ctx, *grads)

    forward = projected.projected_attention

    def attend(*args, **values):
        out = forward(*args, **values)
        seen.append("operators" if out is None else "forward")
        return out

    monkeypatch.setattr(projected.ProjectedAttention, "backward", staticmethod(backward))
    monkeypatch.setattr("native_sparse_attention.attention.projected_attention", attend)
    projected.PASSES.clear()
    with torch.autograd.set_multithreading_enabled(False):  # the variable is this thread's
        yield seen
    replay.everywhere.reset(token)


def layer(compress=None, **settings):
    torch.manual_seed(0)
    settings = {"causal": True, **settings}
    return SparseAttention(
        dim=32, dim_head=16, heads=2, kv_heads=1, sliding_window_size=5, compress_block_size=8,
        compress_block_sliding_stride=4, selection_block_size=8, num_selected_blocks=2,
        compress_mlp=compress or MeanPool(), backend="triton", **settings,
    ).to(DEVICE)  # fmt: skip


def results(module, x, run=None):
    x = x.clone().requires_grad_()
    out = (run or module)(x)
    grads = torch.autograd.grad(out.square().sum(), [x, *module.parameters()])
    return [out.detach(), *grads]


@pytest.mark.slow(one_of=6)
@pytest.mark.parametrize("setting", SETTINGS)
def test_the_same_bits(setting, nodes):
    """Recorded, and repeated with other tensors."""
    module = layer(**SETTINGS[setting])
    lengths = (21, 5) if setting == "plain" or CUDA else (21,)
    for n in lengths:
        x, y = torch.randn(2, 2, n, 32, device=DEVICE).unbind()
        expected = results(module, x)
        for _ in range(2):
            assert all(map(torch.equal, results(module, x), expected))
            other = results(module, y)
        fresh = layer(**SETTINGS[setting])
        with torch.no_grad():
            assert torch.equal(fresh(y), other[0])
    assert nodes.count("backward") == 4 * len(lengths)
    assert not any(
        plan is False for run in projected.PASSES.values() for plan in run.plans.values()
    )


def test_a_collector_sees_a_layer_that_repeats_its_launches(nodes):
    """While it is open, the layer runs the operators, with the same bits."""
    module, x = layer(num_initial_blocks=1), torch.randn(2, 29, 32, device=DEVICE)
    expected = [results(module, x) for _ in range(3)][-1]
    before = list(nodes)
    with collect(module, None) as seen:
        assert all(map(torch.equal, results(module, x), expected))
    assert nodes == before
    (reading,) = seen.forward()
    eager = layer(num_initial_blocks=1)
    eager.backend = "eager"
    with collect(eager, None) as by_eager:
        eager(x)
    assert torch.equal(reading.blocks, by_eager.forward()[0].blocks)
    assert all(map(torch.equal, results(module, x), expected))
    assert nodes == [*before, "forward", "backward"] and len(seen[""]) == 1


def test_without_gradients(nodes):
    module, x = layer(), torch.randn(2, 21, 32, device=DEVICE)
    with torch.no_grad():
        outs = [module(x) for _ in range(4)]
    assert all(torch.equal(out, outs[0]) for out in outs)
    assert nodes == ["operators", *["forward"] * 3]
    half = [module(x.requires_grad_()) for _ in range(2)]
    assert all(torch.equal(out, outs[0]) for out in half)
    frozen = copy.deepcopy(module).requires_grad_(False)
    (one,) = torch.autograd.grad(frozen(x).sum(), x)
    (two,) = torch.autograd.grad(half[0].sum(), x)
    assert torch.equal(one, two)


@pytest.mark.slow(one_of=5)
@pytest.mark.parametrize(
    "settings",
    [
        dict(compress=AttentionPool(16, 8)),
        dict(compress=Halved()),
        dict(branch_kv="independent"),
        dict(rotary_emb=False),
        dict(num_selected_blocks=65),
    ],
    ids=["compress", "a subclass", "branch_kv", "rotary_emb", "many blocks"],
)
def test_other_layers_take_their_operators(settings, nodes):
    n = settings.pop("num_selected_blocks", 2)
    module, x = layer(**settings), torch.randn(1, 13, 32, device=DEVICE)
    module.num_selected_blocks = n
    expected = results(module, x)
    for _ in range(3):
        assert all(map(torch.equal, results(module, x), expected))
    assert "forward" not in nodes and "backward" not in nodes


def test_hooks_of_networks_are_called(nodes):
    module, x = layer(), torch.randn(1, 13, 32, device=DEVICE)
    with torch.no_grad():
        out = [module(x) for _ in range(2)][-1]
        assert nodes.pop() == "forward"
        calls = []
        hook = module.k_compress.register_forward_hook(lambda *args: calls.append(args))
        for _ in range(3):
            torch.testing.assert_close(module(x), out)
        assert len(calls) == 3 and nodes == ["operators"]
        hook.remove()
        module(x)
    assert nodes == ["operators", "forward"]


def test_other_calls_take_their_operators(nodes):
    """Documents, caches, other backends, and whoever looks at dispatches."""
    module, x = layer(), torch.randn(1, 16, 32, device=DEVICE)
    with torch.no_grad():
        out = module(x)
        module(x)
        assert nodes.pop() == "forward"
        documents = torch.arange(16, device=DEVICE)[None] // 9
        for _ in range(3):
            module(x, segment_ids=documents)
            cache = KVCache(16, 1)
            torch.testing.assert_close(module(x, cache=cache), out)
            module(x, disable_triton_kernel=True)
        assert "forward" not in nodes
        from torch.utils.flop_counter import FlopCounterMode

        with FlopCounterMode(display=False) as counter:
            torch.testing.assert_close(module(x), out)
        assert counter.get_total_flops() > 0 and nodes.pop() == "operators"
        with pytest.raises(NotImplementedError, match="transforms of torch.func"):
            torch.func.vmap(module)(x[None])


def test_second_derivatives_are_refused(nodes):
    module, x = layer(), torch.randn(1, 13, 32, device=DEVICE, requires_grad=True)
    module(x)
    (grad,) = torch.autograd.grad(module(x).square().sum(), x, create_graph=True)
    assert nodes[-1] == "backward"
    with pytest.raises(NotImplementedError, match="first derivatives only"):
        grad.square().sum().backward()


def test_under_autocast(nodes):
    module, x = layer(), torch.randn(1, 13, 32, device=DEVICE)

    def run():
        with torch.autocast(DEVICE.split(":")[0], dtype=torch.float16):
            return results(module, x)

    expected = run()
    for _ in range(3):
        assert all(map(torch.equal, run(), expected))
    assert nodes.count("backward") == 3


def test_under_checkpointing(nodes):
    module, x = layer(), torch.randn(1, 13, 32, device=DEVICE)
    expected = results(module, x)
    for reentrant in (False, True):
        run = functools.partial(checkpoint, module, use_reentrant=reentrant)
        for _ in range(2):
            got = results_by_backward(module, x, run)
            assert all(map(torch.equal, got, expected))
    assert nodes.count("backward") == 4


def results_by_backward(module, x, run):
    module.zero_grad()
    x = x.clone().requires_grad_()
    out = run(x)
    out.square().sum().backward()
    return [out.detach(), x.grad, *(p.grad for p in module.parameters())]


def test_twice_through_a_graph(nodes):
    module, x = layer(), torch.randn(1, 13, 32, device=DEVICE, requires_grad=True)
    module(x)
    out = module(x)
    (first,) = torch.autograd.grad(out.sum(), x, retain_graph=True)
    (second,) = torch.autograd.grad(out.sum(), x)
    assert torch.equal(first, second)
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        torch.autograd.grad(out.sum(), x)


def test_what_branches_gave_is_gone_before_most_of_the_backward(nodes, monkeypatch):
    form, alive, found = operators.layer_backward_preprocess, [], []

    def preprocess(outs, **others):
        alive[:] = [weakref.ref(t.untyped_storage()) for t in outs]
        return form(outs=outs, **others)

    module, x = layer(), torch.randn(1, 13, 32, device=DEVICE, requires_grad=True)
    for _ in range(3):
        module(x).sum().backward()
    own = projected.PASSES["backward"]

    def backward(*args):
        if not CUDA:
            gc.collect()  # frames of the interpreter
        found.append([ref() is not None for ref in alive])
        return own(*args)

    monkeypatch.setattr(operators, "layer_backward_preprocess", preprocess)
    monkeypatch.setitem(projected.PASSES, "backward", backward)
    module(x).sum().backward()
    assert found == [[False] * 3]


def test_each_backend_and_setting_has_plans_of_its_own(nodes):
    """A layer whose settings change, and one of the same sizes that may not take kernels."""
    module, x = layer(), torch.randn(1, 24, 32, device=DEVICE)
    with torch.no_grad():
        for _ in range(3):
            module(x)
        module.sliding_window_size = 9
        got = [module(x) for _ in range(3)]
        expected = layer()
        expected.sliding_window_size = 9
        expected.backend = "eager"
        for out in got:
            torch.testing.assert_close(out, expected(x), atol=1e-5, rtol=1e-4)
        before = len(nodes)
        expected(x)
    assert nodes[before:] == []
