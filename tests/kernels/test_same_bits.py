"""Every run of a layer gives the same bits, its gradients too: on a GPU, where what one thread or
kernel does not wait for is there in most runs."""

from contextlib import nullcontext

import pytest
import torch

from benchmarks import problem
from native_sparse_attention import native_sparse_attention
from native_sparse_attention.kernels.common import launch
from tests.helpers.budget import DEVICE, FORMS, in_chunks
from tests.helpers.memory import poisoned

pytestmark = pytest.mark.gpu

NAMES = ("q", "k", "v", "ck", "cv", "branch_gates", "d_out")


def layer(tensors, d_out, within, **settings):
    """The layer and its gradients, by the kernels that `within` says. The tensors are those of
    `native_sparse_attention` in order."""
    # in all threads: the backward has its own
    with launch.using(within):
        out = native_sparse_attention(*tensors, backend="triton", **settings)
        return [out.detach(), *torch.autograd.grad(out, tensors, d_out)]


def bits(t):
    return t.view(torch.int16 if t.itemsize == 2 else torch.int32)


def runs_that_differ(step, times):
    """Of so many, from the first one. Nothing waits for the GPU before the end. Every other run
    begins in memory that holds NaN: what is read too soon cannot be what the run before left."""
    first, differ = [bits(t) for t in step()], []
    for run in range(1, times):
        with poisoned() if run % 2 else nullcontext():
            again = step()
        same = zip(first, map(bits, again), strict=True)
        differ.append(torch.stack([(one != other).any() for one, other in same]).any())
    return int(torch.stack(differ).sum())


def draw(setting, alike=1, B=1):
    """Leaves of the layer and d_out. Queries of so many neighbours are almost one, but for every
    third group of them, so that some choose alike and some do not."""
    rows = [problem.draw(setting, NAMES, torch.device(DEVICE), seed) for seed in range(B)]
    tensors = {name: torch.cat([row[name] for row in rows]) for name in NAMES}
    if alike > 1:
        q = tensors["q"]
        group = torch.arange(q.shape[1], device=q.device) // alike
        leader = torch.where(
            group % 3 > 0, group * alike, torch.arange(len(group), device=q.device)
        )
        tensors["q"] = q[:, leader] + 0.05 * q
    *leaves, d_out = tensors.values()
    return [t.requires_grad_() for t in leaves], d_out


def layer_settings(setting, **others):
    return {**setting.ranking, "sliding_window_size": setting.w, **others}


def small(H, K, stride=1):
    return problem.Setting(T=1024, H=H, K=K, n=5, w=255, stride=stride)


SM90, PORTABLE = FORMS["sm90"], FORMS["portable"]
UNION = launch.UnionRule(4, 1.6, min_groups=0)
APART = {**SM90, "union_sm90": False}
# heads, tokens a ranking, importance, neighbours that are almost one, and what serves
CASES = {
    "shared blocks": (32, 2, 1, "logits", 1, SM90),
    "shared blocks, dq by unions": (32, 2, 1, "logits", 16, {**SM90, "union": UNION}),
    "shared blocks of rankings": (8, 2, 4, "probs", 1, SM90),
    "unions": (32, 2, 1, "probs", 16, {**APART, "union": UNION}),
    "a tile a row": (32, 2, 4, "logits", 1, APART),
    "pairs": (8, 2, 1, "probs", 16, APART),
    "pairs of one head": (2, 2, 1, "logits", 1, APART),
    "many tokens a ranking": (2, 2, 16, "probs", 1, SM90),
    "portable": (32, 2, 1, "probs", 16, {**PORTABLE, "union": UNION}),
    "portable pairs": (8, 2, 1, "probs", 16, PORTABLE),
    "as it is": (32, 2, 1, "logits", 1, {}),
}


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_many_runs(case, recompute):
    H, K, stride, importance, alike, within = CASES[case]
    setting = small(H, K, stride)
    tensors, d_out = draw(setting, alike, B=2)
    settings = layer_settings(setting, importance=importance, recompute=recompute)
    assert runs_that_differ(lambda: layer(tensors, d_out, within, **settings), 100) == 0


@pytest.mark.parametrize("heads", [(32, 2), (8, 2), (2, 2)])
def test_many_runs_by_chunks(heads):
    """Partial results by several chunks, and blocks by several work tiles."""
    setting = small(*heads)
    tensors, d_out = draw(setting, B=2)
    settings = layer_settings(setting)
    with in_chunks(64, (setting.n / 3, 1), 1024, ENOUGH_PROGRAMS=2):
        assert runs_that_differ(lambda: layer(tensors, d_out, APART, **settings), 200) == 0


@pytest.mark.parametrize("importance", ["logits", "probs", "max"])
@pytest.mark.parametrize("heads", [(64, 4), (32, 8), (32, 32)], ids=str)
def test_runs_by_the_rules(heads, importance):
    """Of 16k tokens, by what the library chooses."""
    setting = problem.Setting(T=16384, H=heads[0], K=heads[1])
    tensors, d_out = draw(setting)
    settings = layer_settings(setting, importance=importance)
    assert runs_that_differ(lambda: layer(tensors, d_out, {}, **settings), 10) == 0
