"""The kernels' torch operators: torch's own checks of each, of its backward too, as the public
calls give them their arguments; and that kernels read the tensors of the caller, wherever these
lie."""

import re

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

import native_sparse_attention as library
from benchmarks.problem import pooled
from native_sparse_attention.ops.triton import elementwise
from native_sparse_attention.ops.triton.operator import unit_stride
from native_sparse_attention.rotary import Rotary, rotate
from tests.helpers.budget import DEVICE
from tests.helpers.interpreter import not_of_3_4
from tests.helpers.memory import poisoned

pytest.importorskip("triton")

pytestmark = pytest.mark.kernels

L, D, S, N, W = 8, 4, 8, 2, 9
SIZES = dict(
    compress_block_size=L, compress_block_sliding_stride=D, selection_block_size=S,
    num_selected_blocks=N,
)  # fmt: skip


class Calls(TorchDispatchMode):
    """The first call of each of our operators, with its arguments."""

    def __init__(self):
        super().__init__()
        self.found = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "native_sparse_attention":
            self.found.setdefault(func, args)
        return func(*args, **(kwargs or {}))


def heads_first(t):
    """The same tensor, heads before tokens in memory, as a layer lays them out."""
    return t.transpose(1, 2).contiguous().transpose(1, 2)


def beside_others(t):
    """Part of a projection, whose rows end in other heads."""
    return torch.cat((t, torch.randn_like(t)), 2)[:, :, : t.shape[2]]


def every_other(t):
    """Tokens between which others lie."""
    return torch.stack((t, torch.randn_like(t)), 2)[:, :, 0]


def leaf(*shape):
    return torch.rand(shape, device=DEVICE, requires_grad=True)


def draw(T=12, H=4, K=2, E=16, m=0, B=1, lie=heads_first):
    """A leaf each: q, k, v, ck, cv, which `lie` lays out, with memory for `m`, and gates."""
    q, k, v = (torch.randn(B, T, h, E, device=DEVICE) for h in (H, K, K))
    tensors = dict(q=q, k=k, v=v, ck=pooled(k, L, D), cv=pooled(v, L, D))
    tensors = {name: lie(t).detach() for name, t in tensors.items()}
    if m:
        tensors |= {name: torch.randn(K, m, E, device=DEVICE) for name in ("mem_k", "mem_v")}
    tensors["branch_gates"] = torch.rand(B, T, H, 3, device=DEVICE)
    return {name: t.requires_grad_() for name, t in tensors.items()}


def some(tensors, *names):
    return {name: tensors[name] for name in names}


def window(tensors, **settings):
    call = some(tensors, "q", "k", "v")
    settings = dict(settings, sliding_window_size=W, backend="triton")
    return library.sliding_window_attention(**call, **settings)


def compressed(tensors, **settings):
    call = {n: tensors[n] for n in ("q", "ck", "cv", "mem_k", "mem_v") if n in tensors}
    settings = dict(settings, compress_block_sliding_stride=D, backend="triton")
    return library.compressed_attention(**call, seq_len=tensors["k"].shape[1], **settings)


def selected(tensors, gates=None, lists=None, **settings):
    B, T, _, _ = tensors["q"].shape
    if lists is None:
        lists = torch.tensor([0, -1], dtype=torch.int32, device=DEVICE)
        lists = lists.expand(B, T, tensors["k"].shape[2], -1)
    return library.selected_attention(
        **some(tensors, "q", "k", "v"), block_indices=lists, gates=gates, selection_block_size=S,
        backend="triton", **settings,
    )  # fmt: skip


def ranked(tensors, **settings):
    call = {n: tensors[n] for n in ("q", "ck", "mem_k") if n in tensors}
    settings = {**SIZES, "return_gates": True, "seq_len": tensors["k"].shape[1], **settings}
    return library.select_blocks(**call, **settings, backend="triton")[1]


def layer(tensors, **settings):
    settings = {**SIZES, "sliding_window_size": W, **settings}
    return library.native_sparse_attention(**tensors, **settings, backend="triton")


def one_softmax(tensors, **settings):
    call = some(tensors, "q", "k", "v", "ck")
    sizes = SIZES | dict(num_selected_blocks=1, selection_block_size=4, sliding_window_size=W)
    settings = dict(settings, branches=("selected",), backend="triton")
    return library.native_sparse_attention(**call, **sizes, **settings)


def rotated(tensors):
    rotary = Rotary(16).to(DEVICE)
    heads = [tensors[name].transpose(1, 2) for name in "qk"]
    return rotate(rotary, heads, torch.tensor([3], device=DEVICE), None, "triton")[0]


def projected(_):
    qkv = torch.randn(1, 12, 8 * 16, device=DEVICE, requires_grad=True)
    heads = elementwise.projected_heads(qkv, 4, 16, Rotary(16).to(DEVICE).freqs, None, 1.0)
    return torch.cat([t.flatten() for t in heads])


def averaged(tensors):
    k, v = (tensors[name].transpose(1, 2) for name in "kv")
    return elementwise.CompressMean.apply(k, v, leaf(2, L, 16), leaf(2, L, 16), L, D, 3)[0]


def own_window(tensors):
    """The tensors that few calls have: a window's own keys and values, queries of branch 1."""
    others = {"window_k": "k", "window_v": "v", "cq": "q"}
    others = {name: torch.randn_like(tensors[of]).requires_grad_() for name, of in others.items()}
    return {**tensors, **others}


ATTEND = ("attend", "attend_backward")
# each with the operators that it calls
CASES = {
    "window": (ATTEND, lambda: window(draw(), block_sizes=library.BlockSizes(*[16, 32] * 9))),
    "compressed": (
        ATTEND,
        lambda: compressed(draw(m=2), q_offset=torch.tensor([0], device=DEVICE), sinks=leaf(4)),
    ),
    "selected": (
        ATTEND,
        lambda: selected(draw(), num_initial_blocks=1, gates=leaf(1, 12, 2, 2), sinks=leaf(4)),
    ),
    "ranked": (("select_blocks",), lambda: ranked(draw(m=2), importance="probs")),
    "layer": ((*ATTEND, "attend_backward_preprocess"), lambda: layer(draw())),
    "recomputed": (
        ("select_blocks", *ATTEND),
        lambda: layer(
            own_window(draw(m=2)), recompute=True, use_diff_topk=True, importance="probs",
            sinks=leaf(3, 4),
        ),
    ),
    "one softmax": (ATTEND, lambda: one_softmax(draw(), sinks=leaf(1, 4))),
    "rotated": (("rotate",), lambda: rotated(draw())),
    "projected": (("rotate", "projected_heads_backward"), lambda: projected(None)),
    "means": (("compress_mean", "compress_mean_backward"), lambda: averaged(draw())),
    "means of keys": (
        ("compress_mean_keys",),
        lambda: elementwise.compress_mean_keys(draw()["k"].detach().transpose(1, 2), L, D, 3),
    ),
}  # fmt: skip


@pytest.mark.slow(one_of=20)
@pytest.mark.parametrize("case", CASES)
def test_well_formed(case):
    """Schema, fake and a graph of any sizes, of strided tensors."""
    names, call = CASES[case]
    with Calls() as calls:
        out = call()
        if out.requires_grad:
            out.square().sum().backward()
    assert {func._schema.name.split("::")[1] for func in calls.found} == set(names)
    for func, args in calls.found.items():
        torch.library.opcheck(func, tree_map_only(torch.Tensor, torch.Tensor.detach, args))


def test_every_operator_is_checked():
    checked = {name for names, _ in CASES.values() for name in names}
    names = (name.split("::") for name in torch._C._dispatch_get_all_op_names())
    ours = {name for space, name in names if space == "native_sparse_attention"}
    # test_decode.py, test_compile.py, masks/test_score_mods.py
    elsewhere = {"decode_attention", "places", "tanh_approx"}
    assert ours == checked | elsewhere


@pytest.fixture
def launches(monkeypatch):
    """What each launch was given: tensors, and those that descriptors are of, with the values that
    they had then, in order of size."""
    from triton.runtime.jit import KernelInterface

    given, choose = [], KernelInterface.__getitem__

    def launched(kernel, grid):
        run = choose(kernel, grid)

        def record(*args, **kwargs):
            for t in tree_leaves((args, kwargs)):
                t = getattr(t, "base", t)
                if torch.is_tensor(t) and t.is_floating_point():
                    given.append((t.data_ptr(), t.detach().flatten().sort().values))
            return run(*args, **kwargs)

        return record

    monkeypatch.setattr(KernelInterface, "__getitem__", launched)
    return given


READS = {
    "window": (window, ("q", "k", "v")),
    "compressed": (compressed, ("q", "ck", "cv")),
    "selected": (selected, ("q", "k", "v")),
    "ranked": (ranked, ("q", "ck")),
    "layer": (layer, ("q", "k", "v", "ck", "cv")),
    "one softmax": (one_softmax, ("q", "k", "v", "ck")),
}


@pytest.mark.slow(one_of=3)
@not_of_3_4
@pytest.mark.parametrize("lie", [heads_first, beside_others, every_other])
@pytest.mark.parametrize("case", READS)
def test_strided_inputs_are_read_where_they_lie(launches, case, lie):
    """Forward and backward: no launch has a tensor of an input's values elsewhere."""
    call, names = READS[case]
    tensors = draw(lie=lie)
    with poisoned():  # no output lies where a copy did
        out = call(tensors)
        forward = len(launches)
        out.square().sum().backward()
    for name in names:
        t = tensors[name].detach()
        assert not t.is_contiguous() and t.stride(-1) == 1
        at = t.data_ptr()
        assert any(address == at for address, _ in launches[:forward]), name
        values = t.flatten().sort().values
        copies = [at != address for address, other in launches if torch.equal(values, other)]
        assert copies and not any(copies), name


def test_only_the_last_stride_matters():
    t = torch.randn(2, 6, 4, 16, device=DEVICE)
    for strided in (t, heads_first(t), t[:, ::3], t[:1].expand(3, -1, -1, -1), t[..., 3:9]):
        (row,) = unit_stride(strided)
        assert row.data_ptr() == strided.data_ptr() and row.stride() == strided.stride()
    (row,) = unit_stride(t[..., ::2])
    assert row.stride(-1) == 1 and torch.equal(row, t[..., ::2])


def test_integers_may_be_symbols():
    """Else a compiled graph would hold for one length alone."""
    names = [name for name in torch.ops.native_sparse_attention if name != "name"]
    assert "attend" in names
    for name in names:
        schema = str(getattr(torch.ops.native_sparse_attention, name).default._schema)
        assert not re.search(r"[(, ]int\b", schema), schema
