"""The laws of docs/semantics.md, each once, on every backend. Memory that nothing has written to
holds NaN in one of them; the layer over its caches has tests in `tests/cache` and `decode`."""

import pytest
import torch

import native_sparse_attention as nsa
from native_sparse_attention.varlen import Documents
from tests.helpers import selections
from tests.helpers.budget import CUDA, DEVICE, running
from tests.helpers.calls import BRANCHES, DOCUMENTS, HEADS, LAYERS, D, S, draw
from tests.helpers.memory import poisoned
from tests.helpers.sizes import sizes

KERNELS = [("triton", torch.float32)]
if CUDA:
    KERNELS += [(form, torch.bfloat16) for form in ("sm90", "portable")]
ROWS = [(name, torch.float32, ()) for name in ("eager", "chunked")]
ROWS += [("flex", torch.float32, pytest.mark.gpu if CUDA else ())]
SLOW = [pytest.mark.kernels, pytest.mark.slow(one_of=8)]
ROWS += [(name, dtype, SLOW) for name, dtype in KERNELS]
backends = pytest.mark.parametrize(
    "backend, dtype",
    [pytest.param(n, dtype, marks=m, id=f"{n}-{str(dtype)[6:]}") for n, dtype, m in ROWS],
)
both = pytest.mark.parametrize("causal", [True, False], ids=["causal", "two-sided"])
IN_WINDOW = dict(num_initial_blocks=1, num_local_blocks=2, sliding_window_size=2 * S)
CALLS = {
    **{branch: (branch, {}) for branch in BRANCHES},
    "layer": ("layer", {}),
    "paper": ("layer", dict(IN_WINDOW, importance="probs")),
    "groups, gates": ("layer", dict(selection_stride=4, use_diff_topk=True)),
    "interpolated, each head": ("layer", dict(interpolated_importance_score=True, each=True)),
    "windows longer than blocks": ("layer", sizes(2 * S, 2 * S)),
    "one softmax": ("one softmax", dict(importance="max")),
}
calls = pytest.mark.parametrize("name", CALLS)
pytestmark = pytest.mark.usefixtures("untraced_flex")
LENGTH = 512 if CUDA else 21
N = 3 if CUDA else 1
# one row, for the interpreter's sake: that rows are independent is a law of its own
BATCH = 2 if CUDA else 1
TOKENS = ("q", "k", "v", "cq", "window_k", "window_v", "branch_gates", "gates")

QUERIES = ("q", "cq", "branch_gates", "gates")


def draw_call(name, backend, dtype=torch.float32, place=(LENGTH, LENGTH), batch=BATCH, **more):
    branch, settings = CALLS[name]
    if CUDA and backend == "flex" and name != "layer":
        pytest.skip("compiles for minutes; test_table.py has the branches by flex_attention")
    if backend == "flex" and settings.get("use_diff_topk"):
        settings = dict(settings, use_diff_topk=False)
    if branch in LAYERS:
        more = dict(num_selected_blocks=N) | more
    return draw(branch, dtype, place=place, batch=batch, **settings | more)


def has_gradients(backend):
    return CUDA or backend != "flex"


def run(call, backend):
    """The output, the log-sum-exp of a branch, and the block indices of a layer."""
    with running(backend) as name, torch.no_grad():
        if call.op is not nsa.native_sparse_attention:
            return *call(name), None
        out, block_indices = call(name, return_block_indices=True)
        return out, None, block_indices


def gradients(call, backend, d_out, rows=slice(None)):
    with running(backend) as name:
        call = call.leaves()
        out = call(name)
        out = out[0] if isinstance(out, tuple) else out
        return torch.autograd.grad(
            out[:, rows], list(call.tensors.values()), d_out[:, rows], materialize_grads=True
        )


def stride_of(call):
    """Tokens from window to window."""
    return call.settings.get("compress_block_sliding_stride", D)


def change(call, token, window=None):
    """The call with another tensor for each of tokens, and for each of windows."""
    settings, tensors = dict(call.settings), dict(call.tensors)
    for name in TOKENS:
        if name in tensors:
            tensors[name] = token(tensors[name])
    for name in ("ck", "cv"):
        if name in tensors:
            tensors[name] = (window or token)(tensors[name])
    if "block_indices" in settings:
        settings["block_indices"] = token(settings["block_indices"])
    if "seq_len" in settings:
        settings["seq_len"] = tensors["q"].shape[1]
    return call._replace(tensors=tensors, settings=settings)


def keep_blocks(call, length):
    """Select only blocks of the first tokens."""
    if "block_indices" in call.settings:
        indices = call.settings["block_indices"]
        call.settings["block_indices"] = indices.masked_fill(indices > (length - 1) // S, -1)
    return call


def cut(outs, *at):
    return [None if t is None else t[at] for t in outs]


def close(actual, expected):
    """Every row within a few units in the last place of its size and of the usual size. What is 0
    but for rounding (the gradient of a row with one key) is a difference of larger terms, which
    are sums over the width of a head."""
    assert actual.isfinite().all()
    size = expected.double().norm(dim=-1)
    error = (actual.double() - expected.double()).norm(dim=-1)
    allowed = max(8 * torch.finfo(actual.dtype).eps, 2e-5)
    rounding = 1e-5 * (HEADS[2] / 16) ** 0.5
    assert (error <= allowed * (size + size.mean()) + rounding).all()


def assert_alike(actual, expected):
    """Outputs are close where the same blocks were chosen: at all tokens but a few, between whose
    scores rounding decides. Returns whether at all."""
    (out, _, indices), (right, _, right_indices) = actual, expected
    if indices is None:
        close(out, right)
        return True
    chosen, other = (t.sort(dim=-1).values for t in (indices, right_indices))
    alike = (chosen == other).all(-1).all(-1)
    assert alike.float().mean() >= (0.98 if CUDA else 1.0)
    close(out[alike], right[alike])
    return bool(alike.all())


@calls
@backends
def test_the_future_cannot_move_the_past(name, backend, dtype):
    """Neither other tokens nor none, nor is there a gradient."""
    end, past = LENGTH * 4 // 5, (slice(None), slice(LENGTH * 4 // 5))
    call = keep_blocks(draw_call(name, backend, dtype), end)
    d = stride_of(call)

    def replace(stop):
        def replaced(t):
            later = torch.randn_like(t) if t.is_floating_point() else t.flip(1)
            return torch.cat((t[:, :stop], later[:, stop:]), 1)

        return replaced

    whole = run(call, backend)
    for less in (
        change(call, replace(end), replace(end // d)),
        change(call, lambda t: t[:, :end].clone(), lambda t: t[:, : end // d].clone()),
    ):
        assert_alike(cut(run(less, backend), *past), cut(whole, *past))
    if not has_gradients(backend):
        return
    grads = gradients(call, backend, torch.randn_like(whole[0]), slice(end))
    for t, grad in zip(call.tensors, grads, strict=True):
        later = end // d if t in ("ck", "cv") else end
        assert grad.isfinite().all(), t
        assert t.startswith("mem") or (grad[:, later:] == 0).all(), t


@calls
@backends
def test_a_row_alone_is_the_row_in_a_batch(name, backend, dtype):
    """Gradients too, and where rows begin elsewhere."""
    call = draw_call(name, backend, dtype, batch=2)
    alone = change(call, lambda t: t[1:])
    check_rows(call, alone, backend)
    if backend != "flex" and CALLS[name][0] != "layer":
        place = (5, 29) if not CUDA else (40, 301)
        starts = (place[1] - 9, 8)
        call = draw_call(name, backend, dtype, place, batch=2, starts=starts)
        alone = change(call, lambda t: t[1:])
        alone.settings["q_offset"] = starts[1]
        check_rows(call, alone, backend)


def check_rows(call, alone, backend):
    batch = run(call, backend)
    is_alike = assert_alike(run(alone, backend), cut(batch, slice(1, None)))
    if is_alike and has_gradients(backend):
        d_out = torch.randn_like(batch[0])
        d_out[0] = 0
        grads = gradients(call, backend, d_out), gradients(alone, backend, d_out[1:])
        for t, expected, found in zip(call.tensors, *grads, strict=True):
            close(found, expected if t.startswith("mem") else expected[1:])


@pytest.mark.parametrize(
    "causal, packed",
    [(True, False), (True, True), (False, True)],
    ids=["one", "packed", "two-sided"],
)
@calls
@backends
def test_chunks_of_queries_are_rows_of_the_whole(name, backend, dtype, causal, packed):
    """At their positions over whole keys, as ranks of context parallelism have them: other tokens
    follow; and the last of them by default. The gradients of keys add up to those of the whole.
    Packed, of two documents, the second of which begins at a block."""
    if not causal and name == "one softmax":
        pytest.skip("the same kernels as those of selected")
    call, size = draw_call(name, backend, dtype, causal=causal), 192 if CUDA else 8
    at = torch.arange(LENGTH, device=DEVICE)
    end, second = (250, 256) if CUDA else (13, 16)
    is_token = (at < end) | (at >= (second if packed else 0))
    if packed:
        ends = (at >= second).int() * second, torch.where(at < second, end, LENGTH).int()
        call.settings["documents"] = Documents(*(t.expand(BATCH, -1) for t in ends))
    whole = run(call, backend)
    d_out, is_alike, parts = torch.randn_like(whole[0]), True, []
    d_out[:, ~is_token] = 0
    for start in range(0, LENGTH, size):
        rows = slice(None), slice(start, start + size)
        is_last = start + size >= LENGTH and not packed
        settings = call.settings | ({} if is_last else dict(q_offset=start))
        if "block_indices" in settings:
            settings["block_indices"] = settings["block_indices"][rows]
        if packed:
            settings["documents"] = Documents(*(t[rows] for t in settings["documents"]))
        tensors = {n: t[rows] if n in QUERIES else t for n, t in call.tensors.items()}
        part, there = call._replace(tensors=tensors, settings=settings), is_token[rows[1]]
        found, right = (
            cut(outs, slice(None), there) for outs in (run(part, backend), cut(whole, *rows))
        )
        is_alike &= assert_alike(found, right)
        if has_gradients(backend):
            parts.append(gradients(part, backend, d_out[rows]))
    if not is_alike or not parts:
        return
    expected = gradients(call, backend, d_out)
    for t, grad, *of_parts in zip(call.tensors, expected, *parts, strict=True):
        close(torch.cat(of_parts, dim=1) if t in QUERIES else sum(of_parts), grad)


@both
@calls
@backends
def test_packed_documents_are_each_alone(name, backend, dtype, causal):
    """Gradients too; and tokens that no other document sees have none of it."""
    call = draw_call(name, backend, dtype, lengths=DOCUMENTS, causal=causal)
    packed = run(call, backend)
    d_out = torch.randn_like(packed[0])
    grads = gradients(call, backend, d_out) if has_gradients(backend) else None
    memory = {n: 0.0 for n in call.tensors if n.startswith("mem")}
    first, window, d = 0, 0, stride_of(call)
    for length in DOCUMENTS:
        windows = length // d if causal else -(-length // d)
        tokens = slice(first, first + length), slice(window, window + windows)
        first, window = tokens[0].stop, tokens[1].stop
        if not length:
            continue
        alone = change(call, *(lambda t, at=at: t[:, at] for at in tokens))
        del alone.settings["cu_seqlens"]
        keep_blocks(alone, length)
        is_alike = assert_alike(run(alone, backend), cut(packed, slice(None), tokens[0]))
        if not is_alike:
            grads = None
        if grads is None:
            continue
        rights = gradients(alone, backend, d_out[:, tokens[0]])
        for t, found, right in zip(call.tensors, grads, rights, strict=True):
            if t in memory:
                memory[t] = memory[t] + right.float()
            else:
                close(found[:, tokens[t in ("ck", "cv")]], right)
    for t, right in memory.items() if grads is not None else ():
        close(grads[list(call.tensors).index(t)], right.to(dtype))


@calls
@backends
def test_the_same_bits_in_memory_that_holds_nan(name, backend, dtype):
    """Twice, the second time where nothing was written before."""
    if CUDA and (backend not in dict(KERNELS) or CALLS[name][1].get("use_diff_topk")):
        pytest.skip("cuBLAS asks for a setting of its own to be deterministic")
    call = draw_call(name, backend, dtype)
    expected = run(call, backend)
    d_out = torch.randn_like(expected[0])
    repeats = has_gradients(backend) and not (CUDA and backend == "flex")
    grads = gradients(call, backend, d_out) if repeats else ()
    with poisoned():
        found = run(call, backend)
        again = gradients(call, backend, d_out) if repeats else ()
    for one, other in zip((*found, *again), (*expected, *grads), strict=True):
        assert one is None or (torch.equal(one, other) and not one.isnan().any())


@backends
def test_a_query_that_sees_nothing(backend, dtype):
    """Output 0, log-sum-exp -inf, gradient 0; a sink is the key of value 0 that it then sees."""
    for branch, more in (("compressed", dict(memory=0)), ("selected", dict(num_local_blocks=0))):
        call = draw(branch, dtype, place=(LENGTH, LENGTH), batch=BATCH, **more)
        if branch == "selected":
            call.settings["block_indices"][:] = 0
            call.settings["block_indices"][:, :D] = -1
        out, lse, _ = run(call, backend)
        assert (out[:, :D] == 0).all() and lse[:, :D].isneginf().all()
        assert lse[:, D:].isfinite().all()
        if has_gradients(backend):
            for name, grad in zip(call.tensors, gradients(call, backend, torch.randn_like(out))):
                assert grad.isfinite().all() and (name != "q" or (grad[:, :D] == 0).all())
        sinks = torch.randn(HEADS[0], device=DEVICE)
        call.tensors["sinks"] = sinks
        with_sinks, with_lse, _ = run(call, backend)
        torch.testing.assert_close(with_lse, torch.logaddexp(lse, sinks.to(lse)))
        close(with_sinks, out.float() * (lse - sinks).sigmoid()[..., None])


@pytest.mark.parametrize("rule", selections.RULES)
@backends
def test_a_group_has_the_ranking_of_its_first_token(backend, dtype, rule):
    """With `selection_stride`. A group that began before the call has the leaders handed in, or
    nothing."""
    N, R = 64, 8 if CUDA else 4
    q, ck, mem_k = selections.draw(N, N, 4, 2, 16, dtype=dtype)
    call = {**selections.SETTINGS, **selections.RULES[rule], "seq_len": N, "mem_k": mem_k}
    with running(backend) as name:
        each = nsa.select_blocks(q, ck, **call, backend=name)
        call |= dict(selection_stride=R, backend=name)
        every = nsa.select_blocks(q, ck, **call)
        alike = (every == each[:, torch.arange(N, device=DEVICE) // R * R]).float().mean()
        assert alike >= (0.98 if CUDA else 1.0)
        for offset in (R, 41, 47):
            leaders = every[:, offset] if offset % R else None
            part = nsa.select_blocks(
                q[:, offset:], ck, q_offset=offset, leader_indices=leaders, **call
            )
            assert torch.equal(part, every[:, offset:])
        # rows that start in different places, without leaders too
        starts = [41, 21]
        rows, right = (
            torch.stack([t[b, first : first + 20] for b, first in enumerate(starts)])
            for t in (q, every)
        )
        place = dict(q_offset=torch.tensor(starts, device=DEVICE))
        if backend == "flex":
            return  # the ranking is that of eager PyTorch, for positions that it supports
        part = nsa.select_blocks(rows, ck, **place, leader_indices=right[:, 0], **call)
        assert torch.equal(part, right)
        part = nsa.select_blocks(rows, ck, **place, **call)
        for b, first in enumerate(starts):
            before = -first % R
            assert (part[b, :before] == -1).all()
            assert torch.equal(part[b, before:], right[b, before:])
