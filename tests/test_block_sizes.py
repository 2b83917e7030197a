"""Tile sizes that a user gives: what is refused, that they are used and change nothing else."""

import copy
import pickle

import pytest
import torch

from native_sparse_attention import BlockSizes
from native_sparse_attention.block_sizes import BACKWARD, NAMES
from tests.helpers.budget import DEVICE
from tests.helpers.calls import draw
from tests.helpers.layers import DIM, close, layer, step

kernels = pytest.mark.kernels

# every size another than its neighbour's
FEW = BlockSizes(*(16, 32, 32, 16, 16, 32), *(32, 16, 16, 32, 32, 16), *(16, 32, 32, 16, 16, 16))
MANY = BlockSizes(*(64, 32, 16, 64, 32, 64), *(64, 16, 32, 64, 16, 64), *(64, 16, 16, 64, 64, 64))


@pytest.mark.parametrize("size", [0, -16, 8, 48, 16.0, True, None, "16"], ids=repr)
@pytest.mark.parametrize("name", ["block_q", "block_k_selected", "block_k_dkv"])
def test_what_is_no_size(name, size):
    sizes = dict.fromkeys(NAMES, 16) | {name: size}
    if name in BACKWARD and size is None:
        message = f"none: {name} must be given too"
    else:
        message = f"^{name} must be a power of two from 16 to"
    with pytest.raises(ValueError, match=message):
        BlockSizes(**sizes)
    assert FEW.has_backward_blocks and not BlockSizes(*[16] * 6).has_backward_blocks


def test_without_kernels_nothing_reads_them():
    """Of the other backends; and they travel with a layer."""
    module, x = small(block_sizes=FEW, backend="eager"), torch.randn(1, 20, DIM, device=DEVICE)
    moved = pickle.loads(pickle.dumps(copy.deepcopy(module)))
    assert moved.block_sizes == FEW and torch.equal(moved(x), module(x))
    assert torch.equal(small(backend="eager")(x), module(x))


def small(**settings):
    torch.manual_seed(0)
    sizes = dict(dim_head=16, sliding_window_size=9, num_initial_blocks=1)
    return layer(torch.float32, **sizes, **settings).to(DEVICE)


@pytest.fixture
def launched(monkeypatch, as_written):
    """(kernel, rows, keys) of the tiles that were launched with."""
    pytest.importorskip("triton")
    from native_sparse_attention.kernels.common import launch
    from native_sparse_attention.kernels.flash import flash
    from native_sparse_attention.kernels.selected import key_major, query_major

    for module in (flash, key_major, query_major):  # not cached
        monkeypatch.setattr(module, "plan", module.plan.__wrapped__)
    # not even a prefix is one of few keys
    monkeypatch.setattr(flash, "FEW_KEYS", 0)
    apply_overrides, seen = launch.apply_overrides, set()

    def spy(kernel, tile):
        tile = apply_overrides(kernel, tile)
        seen.add((kernel, tile.block_m, tile.block_n))
        return tile

    monkeypatch.setattr(launch, "apply_overrides", spy)
    return seen


def tiles(sizes, *kernels):
    """What `launched` holds where these sizes were used."""
    part = {
        "forward": "", "window.forward": "_window", "query_major.forward": "_selected",
        "key_major.forward": "_selected", "dq": "_dq", "window.dq": "_window_dq",
        "query_major.dq": "_selected_dq", "dkv": "_dkv", "window.dkv": "_window_dkv",
        "key_major.backward": "_selected_dkv",
    }  # fmt: skip
    return {
        (name, *(getattr(sizes, axis + part[name]) for axis in ("block_q", "block_k")))
        for name in kernels
    }


@kernels
def test_layers_of_different_sizes(launched):
    """Forward and backward of one between those of the other: each in its own sizes, both right.
    With `recompute` a backward forms the forward again, in the forward's sizes."""
    forward = BlockSizes(*(getattr(MANY, name) for name in NAMES[:6]))
    kinds = [{"block_sizes": FEW}, {"block_sizes": forward, "recompute": True}]
    x = torch.randn(1, 13, DIM, device=DEVICE, requires_grad=True)
    eager = small(backend="eager")
    expected = step(eager, x)
    layers = [small(backend="triton", **kind) for kind in kinds]
    outs, used = [], []
    for module in layers:
        outs.append(module(x))
        used.append(launched.copy())
        launched.clear()
    for module, out in zip(layers, outs):
        grads = torch.autograd.grad(out.square().sum(), [x, *module.parameters()])
        close([out, *grads], expected, 2e-5)
        used.append(launched.copy())
        launched.clear()
    parts = ("forward", "window.forward", "key_major.forward")
    assert used[:2] == [tiles(FEW, *parts), tiles(MANY, *parts)]
    parts = ("dq", "window.dq", "dkv", "window.dkv", "key_major.backward")
    assert used[2] == tiles(FEW, *parts)
    # a plan of the forward may be there already; what it was not given is the kernels' own
    again = {tile for tile in used[3] if "forward" in tile[0]}
    assert again <= used[1]
    assert len(used[3] - again) == 5 and not used[3] & tiles(FEW, *parts)


@kernels
def test_branches(launched):
    window = "window.forward", "window.dq", "window.dkv"
    for branch, settings, names in (
        ("window", dict(sliding_window_size=9), window),
        ("compressed", dict(compress_block_sliding_stride=4), ("forward", "dq", "dkv")),
        ("selected", dict(selection_block_size=32, n=2),
         (*window, "query_major.forward", "query_major.dq", "key_major.backward")),
    ):  # fmt: skip
        place, heads = (7, 40), (12, 1, 16, 16)
        call = draw(branch, place=place, heads=heads, memory=0, return_lse=False, **settings)
        call, results = call.leaves(), []
        launched.clear()
        for backend in ("eager", "triton"):
            out = call(backend, block_sizes=FEW)
            grads = torch.autograd.grad(out.square().sum(), list(call.tensors.values()))
            results.append([out, *grads])
        close(*results, 2e-5)
        assert launched == tiles(FEW, *names)


@kernels
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("width, heads, kv_heads", [(64, 4, 4), (128, 16, 1), (192, 8, 2)])
def test_defaults_are_what_the_kernels_choose(width, heads, kv_heads, dtype):
    from native_sparse_attention.kernels.common import launch

    groups = heads // kv_heads

    def apply_overrides():
        how = (width, groups, dtype)
        return [
            *(
                launch.flash_tile(kernel, wide, *how)
                for kernel in ("forward", "dq", "dkv", "prefix.dkv")
                for wide in (True, False)
            ),
            *(launch.query_major_tile(kernel, *how) for kernel in ("forward", "dq")),
            launch.key_major_tile("backward", *how),
            # takes a whole block of keys
            launch.key_major_tile("forward", *how).block_m,
        ]

    sizes = BlockSizes.get_default(width, heads, kv_heads, dtype)
    assert sizes.has_backward_blocks
    before = apply_overrides()
    with launch.sized(sizes):
        assert apply_overrides() == before
    assert apply_overrides() == before
    with pytest.raises(ValueError, match="heads must be a multiple of kv_heads"):
        BlockSizes.get_default(64, 4, 3)
