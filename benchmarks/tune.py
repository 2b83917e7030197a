"""Which tile config is fastest for each kernel: the rows of `kernels/common/tile_configs.py`.

    python -m benchmarks.tune --kernels dq dkv --heads 64/4 32/8
    python -m benchmarks.tune --kernels query_major.dq --tiles 64,64,4,2 64,128,4,3
    python -m benchmarks.tune --kernels query_major.dq --stride 4 --operations whole
    python -m benchmarks.tune --table                      the winners of the rows there

Every operation that launches a kernel is timed with each tile in place of the one in
`tile_configs.py`, which is timed first, after it passed the oracle. A row for each goes to
results/tune.jsonl. The winner has the least product of its times over those of the tile there,
over all operations and lengths in which it ran; rows to paste are printed.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from native_sparse_attention.kernels.common import launch
from native_sparse_attention.kernels.common.launch import TileConfig, TopkTileConfig, UnionRule

from . import attention, common
from .common import PASSES, Row
from .problem import Setting, Tensors
from .providers import Ours, OursCompressed, OursSelect, OursSelected, OursWindow, Provider

KERNELS: tuple[str, ...] = ("forward", "dq", "dkv", "window.forward", "window.dq", "window.dkv")
KERNELS += ("query_major.forward", "query_major.dq", "union.forward", "union.dq")
KERNELS += ("key_major.forward", "key_major.backward", "prefix.dkv", "few.forward")
KERNELS += ("ranking.logits", "ranking.probs")
KERNELS += ("union",)  # the rule for lists that are alike

# by the name on the command line; "selected" for random selections, of which neighbours share none,
# or 2 or 4 of which are alike
OPERATIONS: dict[str, Callable[[], Provider]] = {
    "compressed": OursCompressed,
    "selected": lambda: OursSelected(1),
    "selected-2": lambda: OursSelected(2),
    "selected-4": lambda: OursSelected(4),
    "window": OursWindow,
    "select": OursSelect,
    "select-probs": lambda: OursSelect("ours-probs", "probs"),
    "whole": Ours,
    "whole-probs": lambda: Ours("ours-probs", "probs"),
}
ALONE = ["compressed", "selected", "window", "select", "select-probs"]

ALWAYS, NEVER = 1e-3, 1e6


def candidates(kernel: str, width: int) -> Iterator[Any]:
    """A grid of tiles. Those of `query_major` have as many rows as share block indices, whatever
    they say. A rule that costs next to nothing makes all unions, ALWAYS; one of NEVER none."""
    if kernel == "union":
        for count, cost in itertools.product((2, 4, 8), (ALWAYS, 1.2, 1.6, 2.4, 5.0, NEVER)):
            yield UnionRule(count, cost, min_groups=0)
        return
    if kernel.startswith("ranking"):
        lists = ((0, 0), (8, 8), (16, 6), (32, 4))
        steps = (64, 128) if kernel == "ranking.probs" else (32, 64)  # of windows, or of blocks
        tiles = itertools.product(((64, 4), (128, 4), (128, 8)), steps, lists, (2, 3))
        for (block_m, warps), block_n, each, stages in tiles:
            yield TopkTileConfig(block_m, block_n, *each, warps, stages)
        return
    rows: tuple[int, ...] = (64, 128) if width <= 128 else (32, 64, 128)
    keys = (64, 128) if width <= 128 else (32, 64)
    few_warps: tuple[int, ...] = (4, 8)
    if kernel.startswith(("query_major", "union.")):
        rows, few_warps = (0,), (1, 2, 4, 8)
    for sizes in itertools.product(rows, keys, few_warps, (1, 2, 3)):
        yield TileConfig(*sizes)


def kind(kernel: str) -> type:
    if kernel == "union":
        return UnionRule
    return TopkTileConfig if kernel.startswith("ranking") else TileConfig


def parsed(kernel: str, text: str) -> Any:
    return kind(kernel)(*(float(f) if "." in f else int(f) for f in text.split(",")))


# one operation


class Operation:
    """A pass of a provider on fixed inputs, the kernels of ours asked for by name."""

    def __init__(
        self, provider: Provider, direction: str, setting: Setting, device: torch.device
    ) -> None:
        self.provider, self.direction, self.setting = provider, direction, setting
        provider.backend = "triton"
        self.x: Tensors = attention.prepared(provider, setting, device)
        self.spot_check()
        self.call: Callable[[], Any] = lambda: provider.call(self.x, setting)
        if direction == "backward":
            out = self.call()
            self.call = lambda: attention.backward(provider, self.x, out)

    def spot_check(self) -> None:
        rows = attention.spot_rows(self.setting.T, self.x["q"].device)
        attention.verify(self.provider, self.x, self.setting, rows)

    def asks_for(self, kernel: str) -> bool:
        """Whether a launch reads the kernel's tile config: one without fields fails there."""
        try:
            with launch.using({kernel: object()}):  # type: ignore[dict-item]
                self.call()
        except AttributeError:
            return True
        return False


def tried(operation: Operation, kernel: str, tiles: list[Any], seconds: float) -> Iterator[Row]:
    """A row for the kernel's own tile ("default"), then one for each of `tiles`."""
    device = operation.x["q"].device
    default = common.time_call(operation.call, seconds, device)
    yield {"tile": "default", **default, "over_default": 1.0}
    for tile in tiles:
        row: Row = {"tile": list(dataclasses.astuple(tile))}
        try:
            with launch.using({kernel: tile}):
                operation.spot_check()
                row |= common.time_call(operation.call, seconds, device)
            row["over_default"] = round(row["p50_ms"] / default["p50_ms"], 4)
        except Exception as error:
            row["failed"] = common.why(error)
        yield row
        if not common.still_alive(device):
            raise SystemExit(f"the GPU takes no more work after {kernel}, {tile}")


# all of them


def settings(args: argparse.Namespace) -> Iterator[Setting]:
    for heads, T in itertools.product(args.heads, args.lengths):
        H, K = (int(number) for number in heads.split("/"))
        dtype = getattr(torch, args.dtype)
        if args.device.type == "cuda":
            yield Setting(T, H, K, args.width, s=args.block, dtype=dtype, stride=args.stride)
        else:
            yield dataclasses.replace(attention.tiny(T, H, K), stride=args.stride)


def run(args: argparse.Namespace, recorder: common.Recorder) -> None:
    for setting in settings(args):
        for name, direction in itertools.product(args.operations, PASSES):
            provider = OPERATIONS[name]()
            if direction == "backward" and not provider.differentiable:
                continue
            operation = Operation(provider, direction, setting, args.device)
            case = {"part": name, "pass": direction, **setting.row()}
            for kernel in filter(operation.asks_for, args.kernels):
                tiles = [parsed(kernel, text) for text in args.tiles]
                tiles = tiles or list(candidates(kernel, args.width))
                for row in tried(operation, kernel, tiles, args.seconds):
                    recorder.add({"kernel": kernel, **case, **row})
            del operation
            common.release()
    print(*winners(recorder.rows), sep="\n")


GROUP = ("gpu", "kernel", "D", "G", "s", "selection_stride", "dtype")


def winners(rows: Sequence[Row]) -> list[str]:
    """For each kernel, width, group and dtype on each GPU, the best tile, as `tile_configs.py` has
    them."""
    groups: dict[tuple[Any, ...], dict[tuple[int, ...], dict[Any, float]]] = {}
    for row in rows:
        key = tuple(row[name] for name in GROUP)
        tiles = groups.setdefault(key, {})
        if "failed" not in row:
            tile = () if row["tile"] == "default" else tuple(row["tile"])
            case = tuple(row[name] for name in ("part", "pass", "T", "H"))
            tiles.setdefault(tile, {})[case] = row["over_default"]
    lines = []
    for (gpu, kernel, width, group, block, stride, dtype), tiles in groups.items():
        most = max(len(cases) for cases in tiles.values())
        means = {
            tile: math.exp(sum(map(math.log, cases.values())) / most)
            for tile, cases in tiles.items()
            if len(cases) == most
        }
        best = min(means, key=lambda tile: means[tile])
        what = f"{kind(kernel).__name__}{best}" if best else "the one that is there"
        where = f"width {width}, G={group}, s={block}, stride {stride}, {dtype}, {gpu}"
        lines.append(f'"{kernel}": {what},  # {means[best]:.3f} of the time; {where}')
    return lines


def options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--kernels", nargs="+", choices=KERNELS, default=KERNELS, metavar="NAME")
    add("--operations", nargs="+", choices=list(OPERATIONS), default=ALONE, metavar="NAME")
    add("--stride", type=int, default=1, help="selection_stride, of rankings and wholes")
    add("--lengths", type=int, nargs="+", default=[65536], metavar="T")
    add("--heads", nargs="+", default=["64/4", "32/8", "32/32"], metavar="H/K")
    add("--width", type=int, default=128, help="of a head")
    add("--block", type=int, default=64, help="selection_block_size")
    add("--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"])
    add("--tiles", nargs="*", default=[], metavar="M,N,..", help="fields of a tile; else a grid")


BENCHMARK = common.Benchmark(
    "tune", __doc__, options, run, ("kernel", "part", "pass", "T", "G", "tile"),
    plot=lambda rows: print(*winners(rows), sep="\n"), required=lambda row: False, seconds=0.05,
)  # fmt: skip
main = BENCHMARK.main

if __name__ == "__main__":
    main()
