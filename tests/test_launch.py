"""Launch parameters are data: each architecture has a row for every kernel and size."""

import pytest
import torch

from native_sparse_attention import native_sparse_attention
from tests.budget import DEVICE

launch = pytest.importorskip("native_sparse_attention.kernels.launch")
tiles = pytest.importorskip("native_sparse_attention.kernels.tiles")

ARCHITECTURES = {"hopper": tiles.HOPPER, "ampere": tiles.AMPERE, "elsewhere": tiles.ELSEWHERE}


@pytest.mark.parametrize("capability, name", [
    ((9, 0), "hopper"), ((8, 0), "ampere"), ((8, 7), "ampere"), ((8, 6), "elsewhere"),
    ((8, 9), "elsewhere"), ((10, 0), "elsewhere"), ((7, 5), "elsewhere"), (None, "elsewhere"),
])  # fmt: skip
def test_rows_by_capability(monkeypatch, capability, name):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: capability is not None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(launch, "capability", lambda device: capability)
    assert launch.architecture() is ARCHITECTURES[name]


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_size_has_a_tile(monkeypatch, name):
    monkeypatch.setattr(launch, "architecture", lambda: ARCHITECTURES[name])
    for dtype in (torch.bfloat16, torch.float32):
        for width in (16, 80, 128, 192, 256):
            for groups in (1, 3, 16, 64):
                found = [
                    launch.interval_tile(kernel, wide, width, groups, dtype)
                    for kernel in ("forward", "dq", "dkv", "prefix.dkv")
                    for wide in (True, False)
                ]
                found += [
                    launch.pair_tile(kernel, width, groups, dtype)
                    for kernel in ("forward", "backward")
                ]
                found += [
                    launch.gather_tile(kernel, width, rows, dtype)
                    for kernel in ("forward", "dq")
                    for rows in (groups, launch.architecture().gather_rows)
                ]
                found += [
                    launch.ranking_tile(*rule, dtype, interpolated)
                    for rule in (("logits", width, groups, 16), ("probs", width, groups, 64))
                    for interpolated in (False, True)
                ]
                for tile in found:
                    assert tile.block_m >= groups
                    sizes = (tile.block_m, tile.block_n, tile.num_warps)
                    assert all(size & (size - 1) == 0 for size in sizes)


def test_elsewhere_nothing_is_fetched_ahead():
    """What a GPU of unknown size holds least of is shared memory."""
    rows = tiles.ELSEWHERE
    tables = [*rows.intervals.values(), *rows.pairs.values()]
    tables += [table for by_rows in rows.gather.values() for table in by_rows.values()]
    tables += [rows.few_heads, rows.logits, rows.interpolated, *rows.probs.values()]
    assert {tile.num_stages for table in tables for tile in table.values()} == {1}


@pytest.mark.kernels
@pytest.mark.parametrize("importance", ["logits", "probs"])
def test_a_length_compiles_nothing_anew(monkeypatch, importance):
    """What a kernel is compiled for is the same at all lengths, forward and backward."""
    from native_sparse_attention.kernels import interval

    compiled: dict[int, set] = {}

    def record(self, *args, grid, warmup, **kwargs):
        given = dict(zip(self.arg_names, args)) | kwargs
        constants = self.fn.__annotations__.keys() | (kwargs.keys() - set(self.arg_names))
        compiled[T].add(
            (self.fn.__module__, self.fn.__name__, *((n, given[n]) for n in sorted(constants)))
        )

    monkeypatch.setattr(type(interval.forward_kernel), "run", record)
    for T in (1100, 2311, 3800):
        compiled[T] = set()
        shapes = (T, 4, 16), (T, 1, 16), (T, 1, 16), (T // 4, 1, 16), (T // 4, 1, 16), (T, 4, 3)
        tensors = [torch.zeros(1, *shape, device=DEVICE, requires_grad=True) for shape in shapes]
        memory = torch.zeros(2, 1, 2, 16, device=DEVICE, requires_grad=True)
        out = native_sparse_attention(
            *tensors, mem_k=memory[0], mem_v=memory[1], compress_block_size=8,
            compress_block_sliding_stride=4, selection_block_size=8, num_selected_blocks=2,
            sliding_window_size=9, importance=importance, use_diff_topk=True, backend="triton",
        )  # fmt: skip
        out.sum().backward()
    first, *others = compiled.values()
    assert len(first) > 10 and all(other == first for other in others)
