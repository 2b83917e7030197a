"""The specification in memory linear in the length: its tiles, its memory, and derivatives of
derivatives. Its numbers are in the table (`test_table.py`)."""

import itertools
import shutil

import pytest
import torch

import native_sparse_attention as nsa
from native_sparse_attention.ops import chunked
from tests.helpers import layers, memory
from tests.helpers.budget import CUDA, running
from tests.helpers.calls import draw


def test_hidden_keys_are_not_computed(monkeypatch):
    """Keys past a chunk's queries are cut, and those before its window: rows and keys of a tile.
    Tiles that are seen whole have no mask."""
    q, ck = torch.randn(2, 64, 4, 8), torch.randn(2, 32, 4, 8)
    tiles, masked, form_tile = [], [], chunked.form_tile

    def record(q, k, gates, rows, keys, plan):
        tile = form_tile(q, k, gates, rows, keys, plan)
        tiles.append((rows.stop - rows.start, keys.stop - keys.start))
        masked.append(tile[-1] is not None)
        return tile

    monkeypatch.setattr(chunked, "form_tile", record)
    with running("chunked"):
        monkeypatch.setattr(chunked, "CHUNK_SCORES", 2 * 4 * 16 * 16)
        nsa.sliding_window_attention(q, q, q, sliding_window_size=3)
        assert tiles == [(16, 16)] + [(16, 16), (16, 3)] * 3
        tiles.clear()
        nsa.compressed_attention(q, ck, ck, compress_block_sliding_stride=2)
        assert tiles == [(16, 7), (16, 15), (16, 16), (16, 7), (16, 16), (16, 15)]
        tiles.clear()
        indices = torch.full((2, 64, 4, 1), -1)
        nsa.selected_attention(q, q, q, indices, selection_block_size=8)
        assert tiles == [(16, 16)] * (1 + 2 + 3 + 4)
    tiles.clear()
    masked.clear()
    q.requires_grad_()
    out = nsa.chunked_attention(q, q, q, causal=True, q_chunk_size=16, k_chunk_size=16)
    assert tiles == [(16, 16)] * (1 + 2 + 3 + 4)
    assert masked == [on_diagonal for i in range(4) for on_diagonal in [False] * i + [True]]
    out.sum().backward()
    assert len(tiles) == 2 * (1 + 2 + 3 + 4)


LONG = dict.fromkeys(
    ("compress_block_size", "compress_block_sliding_stride", "selection_block_size"), 128
) | dict(heads=1, kv_heads=1)


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings, longest", [({}, 16384), (dict(importance="probs", use_diff_topk=True), 8192)]
)
def test_a_layer_trains_in_linear_memory_on_the_cpu(settings, longest, monkeypatch):
    module = layers.layer(torch.float32, **settings, **LONG)
    monkeypatch.setattr(chunked, "MAX_SCORES", 32 * longest)
    monkeypatch.setattr(chunked, "CHUNK_SCORES", 32 * longest)
    x = torch.randn(1, longest, layers.DIM)

    def step(T):
        """Its peak, and what the first tokens have of it."""
        given, outs = x[:, :T].clone().requires_grad_(), []
        peak = memory.peak(lambda: outs.append(module(given)) or outs[0][:, :512].sum().backward())
        assert given.grad[:, :512].isfinite().all() and not given.grad[:, 512:].any()
        return peak, (outs[0][:, :512].detach(), given.grad[:, :512])

    steps = [step(T) for T in (longest // 16, longest // 4, longest)]
    for (less, _), (more, _) in itertools.pairwise(steps):
        assert more < 4 * less, [peak for peak, _ in steps]
    # the specification as it is has the same numbers; its memory is quadratic
    monkeypatch.setattr(chunked, "MAX_SCORES", 2**40)
    (less, first), (more, _) = step(1024), step(4096)
    assert more > 8 * less
    for _, values in steps:
        torch.testing.assert_close(values, first)


@pytest.mark.slow(one_of=2)
@pytest.mark.skipif(CUDA or shutil.which("g++") is None, reason="g++ compiles for a CPU")
@pytest.mark.parametrize("branch", ["compressed", "selected"])
def test_compiled_for_a_cpu(branch):
    """By torch's own compiler, of keys that fill no block, forward and backward."""
    from torch._inductor import config  # loads sympy

    gated = dict(gated=True) if branch == "selected" else {}
    call = draw(branch, torch.float64, place=(75, 75), sinks=True, **gated).leaves()
    settings = dict(call.settings, return_lse=False)

    def attend(*tensors):
        return call.op(**dict(zip(call.tensors, tensors)), **settings, backend="eager")

    leaves, results = list(call.tensors.values()), []
    # torch compiles a program to ask whether g++ knows what the CPU has
    with config.patch({"cpp.vec_isa_ok": True}):
        for run in (attend, torch.compile(attend, fullgraph=True)):
            out = run(*leaves)
            results.append([out, *torch.autograd.grad(out.square().sum(), leaves)])
    torch.testing.assert_close(*results)
