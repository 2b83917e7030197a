"""The kernels' torch operators: torch's own checks of each, of its backward too, as the public
calls give them their arguments; and that kernels read the tensors of the caller, wherever these
lie."""

import re

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from native_sparse_attention import BlockSizes, select_blocks
from native_sparse_attention.ops.decode import decode_attention, pack_keys, workspace
from native_sparse_attention.ops.triton.operator import unit_stride
from native_sparse_attention.rotary import Rotary, rotate
from tests.helpers.budget import DEVICE
from tests.helpers.calls import RANKING, D, S, draw, heads_first
from tests.helpers.interpreter import not_of_3_4
from tests.helpers.memory import poisoned
from tests.kernels.decode import test_decode

pytestmark = pytest.mark.kernels


class Calls(TorchDispatchMode):
    """The first call of each of our operators, with its arguments."""

    def __init__(self):
        super().__init__()
        self.found = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "native_sparse_attention":
            self.found.setdefault(func, args)
        return func(*args, **(kwargs or {}))


T = S + D  # a block that is ranked, and a window more


def beside_others(t):
    """Part of a projection, whose rows end in other heads."""
    return torch.cat((t, torch.randn_like(t)), 2)[:, :, : t.shape[2]]


def every_other(t):
    """Tokens between which others lie."""
    return torch.stack((t, torch.randn_like(t)), 2)[:, :, 0]


def call_of(branch, lie=heads_first, **settings):
    """A call of few tokens, whose tensors are leaves that `lie` lays out."""
    settings = dict(place=(T, T), heads=(4, 2, 16, 16), batch=1) | settings
    call = draw(branch, lie=lie, **settings)
    return call._replace(tensors={n: t.requires_grad_() for n, t in call.tensors.items()})


def run(branch, **settings):
    out = call_of(branch, **settings)("triton")
    return out[0] if isinstance(out, tuple) else out


def ranked(lie=heads_first):
    tensors = call_of("compressed", lie).tensors
    tensors = {name: tensors[name] for name in ("q", "ck", "mem_k")}
    sizes = dict(RANKING, importance="probs", return_gates=True, seq_len=T)
    return tensors, lambda: select_blocks(**tensors, **sizes, backend="triton")[1]


def rotated():
    rotary = Rotary(16).to(DEVICE)
    heads = [torch.rand(1, 12, n, 16, device=DEVICE, requires_grad=True) for n in (4, 2)]
    heads = [t.transpose(1, 2) for t in heads]
    return rotate(rotary, heads, torch.tensor([3], device=DEVICE), None, "triton")[0]


def decoded():
    """A step that writes the rankings that its tokens share, and counts programs."""
    few = dict(T=2, memory=1, selection_stride=4, lengths=(38, 5))
    tensors, settings = test_decode.problem(torch.float32, **few)
    written = dict(ranking=test_decode.ring(settings, (2, 1), 2), counters=workspace(2, 1, DEVICE))
    return decode_attention(**tensors, **settings, **written, backend="triton")


ATTEND = ("attend", "attend_backward")
# each with the operators that it calls
CASES = {
    "window": (ATTEND, lambda: run("window", block_sizes=BlockSizes(*[16, 32] * 9))),
    "compressed": (ATTEND, lambda: run("compressed", starts=(0,), sinks=True)),
    "selected": (
        ATTEND, lambda: run("selected", num_initial_blocks=1, gated=True, sinks=True)
    ),
    "ranked": (("select_blocks",), lambda: ranked()[1]()),
    "layer": ((*ATTEND, "attend_backward_preprocess"), lambda: run("layer", memory=0)),
    "recomputed": (
        ("select_blocks", *ATTEND),
        lambda: run(
            "layer", window="kv", raw=True, recompute=True, use_diff_topk=True,
            importance="probs", sinks=True,
        ),
    ),
    "one softmax": (
        ATTEND,
        lambda: run("one softmax", selection_block_size=4, num_selected_blocks=1, sinks=True),
    ),
    "rotated": (("rotate",), rotated),
    "decoded": (("decode_attention",), decoded),
    "packed": (("pack_keys",), lambda: pack_keys(torch.rand(2, 19, 1, 16, device=DEVICE), 4)),
}  # fmt: skip


@pytest.mark.slow(one_of=9)
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
    # test_compile.py, masks/test_score_mods.py
    elsewhere = {"places", "tanh_approx"}
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


@pytest.mark.slow(one_of=6)
@not_of_3_4
@pytest.mark.parametrize("lie", [heads_first, beside_others, every_other])
@pytest.mark.parametrize(
    "branch", ["window", "compressed", "selected", "ranked", "layer", "one softmax"]
)
def test_strided_inputs_are_read_where_they_lie(launches, branch, lie):
    """Forward and backward: no launch has a tensor of an input's values elsewhere."""
    if branch == "ranked":
        tensors, call = ranked(lie)
    else:
        few = dict(selection_block_size=4, num_selected_blocks=1)
        made = call_of(branch, lie, memory=0, **few if branch == "one softmax" else {})
        tensors, call = made.tensors, lambda: made("triton")
    with poisoned():  # no output lies where a copy did
        out = call()
        forward = len(launches)
        out = out[0] if isinstance(out, tuple) else out
        out.square().sum().backward()
    for name in ("q", "k", "v", "ck", "cv"):
        if name not in tensors:
            continue
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


def test_tensors_given_for_several_branches():
    """The shared ones given again as those of a branch: their gradients add up."""
    call = call_of("layer")
    leaves = q, k, v = [call.tensors[name] for name in "qkv"]
    outs = call("triton"), call("triton", cq=q, window_k=k, window_v=v)
    grads = [torch.autograd.grad(out.square().sum(), leaves) for out in outs]
    torch.testing.assert_close(*grads)


def test_integers_may_be_symbols():
    """Else a compiled graph would hold for one length alone."""
    names = [name for name in torch.ops.native_sparse_attention if name != "name"]
    assert "attend" in names
    for name in names:
        schema = str(getattr(torch.ops.native_sparse_attention, name).default._schema)
        assert not re.search(r"[(, ]int\b", schema), schema
