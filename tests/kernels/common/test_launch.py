"""Launch parameters are data: each architecture has a row for every kernel and size; grids, and
launches beside each other."""

import contextlib
import functools
import itertools
from types import SimpleNamespace

import pytest
import torch

from native_sparse_attention.kernels import rotary
from native_sparse_attention.kernels.common import launch, streams
from native_sparse_attention.kernels.common import tile_configs as tiles
from native_sparse_attention.kernels.decode import kv_cache
from tests.helpers.budget import DEVICE
from tests.helpers.calls import draw, normal
from tests.helpers.interpreter import not_of_3_4
from tests.helpers.sizes import sizes

ARCHITECTURES = {"hopper": tiles.HOPPER, "ampere": tiles.AMPERE, "elsewhere": tiles.OTHER_GPUS}


@pytest.mark.parametrize("capability, name", [
    ((9, 0), "hopper"), ((8, 0), "ampere"), ((8, 7), "ampere"), ((8, 6), "elsewhere"),
    ((8, 9), "elsewhere"), ((10, 0), "elsewhere"), ((7, 5), "elsewhere"), (None, "elsewhere"),
])  # fmt: skip
def test_rows_by_capability(monkeypatch, capability, name):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: capability is not None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    assert launch.architecture() is ARCHITECTURES[name]


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_size_has_a_tile(monkeypatch, name):
    monkeypatch.setattr(launch, "architecture", lambda: ARCHITECTURES[name])
    problems = itertools.product(
        (torch.bfloat16, torch.float32), (16, 80, 128, 192, 256), (1, 3, 16, 64)
    )
    for dtype, width, groups in problems:
        how = width, groups, dtype
        flash = itertools.product(
            ("forward", "dq", "dkv", "prefix.dkv"), (True, False), (0, 1, 512, 513, 1025)
        )
        found = [launch.flash_tile(kernel, wide, *how, keys) for kernel, wide, keys in flash]
        found += [launch.key_major_tile(kernel, *how) for kernel in ("forward", "backward")]
        for kernel, rows in itertools.product(
            ("forward", "dq"), (groups, launch.architecture().query_major_rows)
        ):
            found.append(launch.query_major_tile(kernel, width, rows, dtype))
        for rule, interpolated in itertools.product(("logits", "probs"), (False, True)):
            n = 64 if rule == "probs" else 16
            found.append(launch.topk_tile(rule, width, groups, n, dtype, interpolated))
        for tile in found:
            assert tile.block_m >= groups
            sizes = (tile.block_m, tile.block_n, tile.num_warps)
            assert all(size & (size - 1) == 0 for size in sizes)


def draw_layer(B, T, H, K, **settings):
    return draw(
        "layer", place=(T, T), heads=(H, K, 16, 16), batch=B, **sizes(8, 4, 8, w=17), **settings
    ).leaves()  # fmt: skip


@not_of_3_4
@pytest.mark.kernels
@pytest.mark.parametrize("importance", ["logits", "probs", "max"])
def test_a_length_compiles_nothing_anew(monkeypatch, importance):
    """What a kernel is compiled for is the same at all lengths, forward and backward."""
    from native_sparse_attention.kernels.flash import flash

    compiled: dict[int, set] = {}

    def record(self, *args, grid, warmup, **kwargs):
        given = dict(zip(self.arg_names, args)) | kwargs
        constants = self.fn.__annotations__.keys() | (kwargs.keys() - set(self.arg_names))
        compiled[T].add(
            (self.fn.__module__, self.fn.__name__, *((n, given[n]) for n in sorted(constants)))
        )

    monkeypatch.setattr(type(flash.nsa_flash_fwd), "run", record)
    for T in (1100, 2311, 3800):
        compiled[T] = set()
        draw_layer(1, T, 4, 1, importance=importance)("triton").sum().backward()
    first, *others = compiled.values()
    assert len(first) > 10 and all(other == first for other in others)


def layer(B, T, H, K, **settings):
    """The layer, forward and backward: its output, the selection and every gradient."""
    call = draw_layer(B, T, H, K, **settings)
    out, lists = call("triton", return_block_indices=True)
    return [out, lists, *torch.autograd.grad(out.square().sum(), list(call.tensors.values()))]


def written(B, K):
    """New entries in their places, windows that they may complete, and heads that are turned."""
    new, store, rings = ({name: normal(B, K, n, 16) for name in "kv"} for n in (3, 9, 12))
    lengths = torch.arange(B, device=DEVICE, dtype=torch.int32) % 5
    kv_cache.append(new, store, lengths, 3)
    rotated = rotary.rotate([*new.values()], torch.ones(8, device=DEVICE), lengths, None, 0, 1.0)
    windows = kv_cache.windows(new, rings, lengths, 8, 4)
    return [*store.values(), *rotated, *windows.values()]


@pytest.mark.slow(one_of=3)
@pytest.mark.kernels
@pytest.mark.parametrize("call", [
    functools.partial(layer, 2, 12, 2, 1, interpolated_importance_score=True),
    functools.partial(layer, 2, 9, 9, 1, importance="probs"),
    functools.partial(written, 3, 2),
], ids=["pairs", "gather", "entries"])  # fmt: skip
def test_a_flipped_grid_gives_the_same(monkeypatch, forget_plans, call):
    """As for more rows x heads than fit along an axis."""
    results = []
    with launch.using({"union": launch.UnionRule(4, 1.1, min_groups=0)}):
        for most in (launch.MAX_GRID_Y, 0):
            monkeypatch.setattr(launch, "MAX_GRID_Y", most)
            forget_plans()
            torch.manual_seed(0)
            results.append(call())
    for value, flipped in zip(*results, strict=True):
        assert torch.equal(value, flipped)


@pytest.mark.gpu
def test_more_rows_than_fit_along_an_axis():
    rows = launch.MAX_GRID_Y + 2
    assert all(found.isfinite().all() for found in layer(rows, 12, 2, 1))
    assert all(found.isfinite().all() for found in layer(rows, 12, 10, 1, importance="probs"))
    assert all(found.isfinite().all() for found in written(rows, 2))


@pytest.mark.gpu
@pytest.mark.parametrize("own_stream", (False, True))
def test_waits_at_both_ends(own_stream):
    """What is launched within sees what was launched before, and what is launched after the end
    sees it, with no wait of the host."""
    device, cycles = torch.device("cuda", torch.cuda.current_device()), 20_000_000
    with torch.cuda.stream(torch.cuda.Stream() if own_stream else torch.cuda.current_stream()):
        first = torch.cuda.current_stream()
        x, y = (torch.zeros(1 << 20, device=device) for _ in range(2))
        torch.cuda._sleep(cycles)
        x.fill_(1.0)
        with streams.forked(device) as beside:
            with beside:
                assert torch.cuda.current_stream() != first
                torch.cuda._sleep(cycles)
                y.copy_(x)
            x.mul_(1.0)
        y += 1.0
    torch.cuda.synchronize()
    assert (y == 2.0).all()


@pytest.mark.parametrize(
    "version, capability, is_supported",
    [("3.6.1", (9, 0), True), ("3.9.0", (9, 0), True), ("3.6.0", (10, 0), False),
     ("3.5.1", (9, 0), False), ("3.10.0", (9, 0), False)],
)  # fmt: skip
def test_hopper_kernels_run_with_known_versions_of_triton(
    monkeypatch, version, capability, is_supported
):
    monkeypatch.setattr(launch.triton, "__version__", version)
    monkeypatch.setattr(launch, "capability", lambda device: capability)
    q = SimpleNamespace(device=torch.device("cuda", 0))
    warned = pytest.warns(UserWarning, match=rf"Triton {version}.*Install 'triton>=3\.6,<3\.10'")
    is_unknown = version in ("3.5.1", "3.10.0")
    with warned if is_unknown else contextlib.nullcontext():
        assert launch.supports_gluon(q) == is_supported
