"""Launches every kernel a few times at odd, small shapes, for a memory checker to watch: in parts,
each a process of its own, or with `--jobs 0` in this one:

    python tests/scripts/sanitize.py
    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --error-exitcode 1 \\
        python tests/scripts/sanitize.py --jobs 0

or `make sanitize`, which does both: the first compiles, on all cores, what the second launches.
Computes no reference; fails where a kernel was not launched.

Nearly all of the time is the compiler's, for each dtype, width and group of heads. Bounds hardly
depend on them: there is one dtype, and one shape of heads, which fills no tile; on a GPU also heads
that fill their tiles, and wider ones.
"""

import argparse
import importlib
import json
import os
import pkgutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

# also as a script, whose folder alone is on the path
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from native_sparse_attention import KVCache, PagedKVCache, SparseAttention, kernels, select_blocks
from native_sparse_attention.kernels.common import launch
from native_sparse_attention.kernels.decode import kv_cache
from native_sparse_attention.kernels.selected import query_major
from tests.helpers.budget import CUDA, DEVICE, FORMS, in_chunks
from tests.helpers.calls import draw, normal
from tests.helpers.sizes import sizes

# Triton's interpreter has no bfloat16
DTYPE = torch.bfloat16 if CUDA else torch.float32
# whether kernels of a Hopper run here
HOPPER = launch.supports_gluon(torch.empty(0, device=DEVICE))
# query heads, KV heads, and widths of keys and of values
HEADS = (6, 2, 24, 40)
SIZES = sizes(8, 4, 8, n=3, w=11, num_initial_blocks=1, num_local_blocks=2)
LARGE = SIZES | sizes(32, 16, 64, w=129)


def all_kernels() -> Iterator[tuple[str, Any]]:
    """What has a grid, here: functions of a module of `kernels` that are named so."""
    for info in pkgutil.walk_packages(kernels.__path__, f"{kernels.__name__}."):
        short = info.name.removeprefix(f"{kernels.__name__}.")
        if short.endswith("_sm90") and not HOPPER:
            continue
        module = importlib.import_module(info.name)
        for name, value in vars(module).items():
            if name.startswith("nsa_") and value.fn.__module__ == module.__name__:
                yield f"{short}.{name}", value


def watch() -> set[str]:
    """The kernels launched from now on."""
    launched: set[str] = set()
    for name, kernel in all_kernels():
        kernel.add_pre_run_hook(lambda *_, _name=name, **__: launched.add(_name))
    return launched


def run(branch: str, **settings: Any) -> None:
    """A call forward and backward."""
    out = draw(branch, DTYPE, **settings).leaves()("triton")
    (out[0] if isinstance(out, tuple) else out).sum().backward()


def layer(T: int, S: int, heads: tuple[int, int, int, int] = HEADS, **settings: Any) -> None:
    """The whole layer, with memory slots if not told otherwise."""
    run("layer", place=(T, S), heads=heads, **{**SIZES, "memory": 3, **settings})


def packed(**settings: Any) -> None:
    """Documents in a row, some of them of no token or one; with a cap and sinks."""
    sizes = dict(SIZES, lengths=[3, 0, 1, 38, 17], heads=HEADS, memory=0, soft_cap=2.0, sinks=True)
    run("layer", **{**sizes, "num_local_blocks": 1, **settings})


def module(**settings: Any) -> SparseAttention:
    return SparseAttention(
        24, 24, 6, 5, 8, 8, 2, kv_heads=2, causal=True, compress_block_sliding_stride=4,
        backend="triton", **settings,
    ).to(DEVICE)  # fmt: skip


def steps(cache: KVCache, **settings: Any) -> None:
    """Steps of decoding, of one token and of several, some of them not real, to a window's end."""
    attention = module(num_compressed_mem_kv=1, **settings)
    with torch.no_grad():
        for counts in ([8, 2], [8, 1], [1, 1]):
            attention(normal(2, max(counts), 24), cache=cache, lengths=counts)


# parts


def chunks() -> None:
    """Several chunks, and several work tiles of a block."""
    with in_chunks(64, (0.0, 16), 16):
        layer(37, 41)


def ragged() -> None:
    """The branches alone, over rows that start at different positions; indices and gates of a
    caller's."""
    place = dict(place=(5, 37), starts=(29, 3), heads=(18, 2, 24, 24), memory=0)
    run("window", sliding_window_size=7, **place)
    run("compressed", compress_block_sliding_stride=4, **place)
    for each in (False, True):
        run("selected", selection_block_size=6, each=each, gated=True, **place)
    q, ck, mem_k = (normal(*n, 24, dtype=DTYPE) for n in ((2, 5, 18), (2, 9, 2), (2, 3)))
    sizes = ("compress_block_size", "compress_block_sliding_stride", "selection_block_size")
    before = torch.randint(-1, 7, (2, 2, 5), device=DEVICE, dtype=torch.int32)
    for importance in ("logits", "probs", "max"):
        select_blocks(
            q, ck, mem_k=mem_k, num_selected_blocks=5, selection_stride=2, leader_indices=before,
            importance=importance, backend="triton", **dict.fromkeys(sizes, 4),
            q_offset=torch.tensor([29, 3], device=DEVICE),
        )  # fmt: skip


def unions() -> None:
    """Neighbours that chose the same blocks, as unions; and unions in the order of chunks."""
    with launch.using({"union": launch.UnionRule(4, 1.1, min_groups=0)}):
        lists = torch.rand(2, 19, 1, 4, device=DEVICE).argsort(-1)[..., :3].int() - 1
        selection = launch.Selection(lists, 5, 0, 0, True)
        query_major.allocate(selection, 8, 4).write(selection)
        call = draw(
            "selected", DTYPE, place=(19, 19), heads=(12, 1, 24, 24), selection_block_size=5,
            num_local_blocks=0,
        )  # fmt: skip
        lists = call.settings["block_indices"]
        lists[:, :8], lists[:, 12:] = torch.tensor([[2, 0, 1]], device=DEVICE), lists[:, :1]
        call.leaves()("triton")[0].sum().backward()


def cached() -> None:
    """Decoding: with re-ranking, and of lengths that the device holds; by the kernel that reads all
    blocks before it knows which are selected, and by the persistent one over pages."""
    steps(KVCache(24, 2), selection_stride=4)
    lengths, counts = (torch.tensor(n, device=DEVICE, dtype=torch.int32) for n in ([9, 3], [0, 4]))
    for real in (None, counts):  # in compiled steps
        kv_cache.starts(lengths, real, 4, 24)
    steps(KVCache(24, 2), attention_sinks=True)
    steps(PagedKVCache(8, 6, 2, 24), soft_cap=2.0)
    pages = dict(importance="probs", branch_kv="independent", attention_sinks=True)
    steps(PagedKVCache(8, 6, 2, 24), soft_cap=2.0, **pages)


def stages() -> None:
    """Steps whose groups of blocks, ranked by means, an earlier token has kept."""
    attention = module(
        branches=("selected",), importance="max", rank_rotated=True, num_local_blocks=4,
        num_selected_groups=1,
    )  # fmt: skip
    cache = KVCache(96, 2)
    with torch.no_grad():
        for T in (69, 1, 3):
            attention(normal(2, T, 24), cache=cache)


def hopper() -> None:
    """Neighbours that chose differently: blocks read once for all of them; dq by unions of some."""
    with launch.using(FORMS["sm90"] | {"union": launch.UnionRule(4, 1.1, min_groups=0)}):
        for heads, T, stride in (
            ((12, 1, 128, 128), 131, 1), ((32, 2, 64, 64), 256, 1), ((16, 1, 128, 128), 131, 1),
            ((8, 2, 128, 128), 131, 1), ((2, 2, 128, 128), 131, 1), ((4, 2, 128, 128), 256, 8),
            ((32, 2, 128, 128), 132, 4),
        ):  # fmt: skip
            importance = "probs" if heads[0] in (8, 16) else "logits"
            more = dict(memory=3 * (heads[0] != 16), selection_stride=stride, importance=importance)
            layer(T, 256, heads, **LARGE, **more)
    q, k = (normal(1, 700, heads, 128, dtype=DTYPE) for heads in (4, 2))
    tokens = dict.fromkeys(("compress_block_size", "compress_block_sliding_stride"), 1)
    windows = dict.fromkeys(tokens, 16) | dict(num_selected_groups=1, k=k)
    for settings, ck in ((tokens, k), (windows, k[:, :688].unflatten(1, (-1, 16)).mean(2))):
        for importance in ("max", "head_max"):
            select_blocks(
                q, ck, importance=importance, selection_block_size=32, num_selected_blocks=3,
                num_local_blocks=4, seq_len=700, backend="triton", **settings,
            )  # fmt: skip


PARTS: dict[str, Callable[[], None]] = {
    "causal": lambda: layer(21, 53, importance="probs"),
    "unshared": lambda: layer(1, 29, query_heads_share_selected_kv=False),
    "one token": lambda: layer(1, 1),
    "forced": lambda: layer(9, 13, num_selected_blocks=0),
    "not causal": lambda: layer(19, 19, causal=False, interpolated_importance_score=True),
    # and local blocks in the window's launch
    "stride": lambda: layer(33, 33, selection_stride=4, recompute=True, sliding_window_size=17),
    # rows that the tensor memory accelerator cannot read
    "unaligned": lambda: layer(23, 29, (3, 1, 17, 19)),
    "gates": lambda: layer(23, 29, use_diff_topk=True, num_selected_blocks=2),
    "gates of probs": lambda: layer(
        23, 23, use_diff_topk=True, importance="probs", selection_stride=4, num_selected_blocks=2
    ),
    "documents": lambda: packed(importance="probs", use_diff_topk=True),
    "documents, not causal": lambda: packed(causal=False),
    **{part.__name__: part for part in (chunks, ragged, unions, cached, stages)},
}
if CUDA:
    # blocks of as many keys as a tile has, read by the tensor memory accelerator
    PARTS["full"] = lambda: layer(
        131, 211, (16, 1, 128, 128), **LARGE, importance="probs", use_diff_topk=True
    )
    PARTS["wide"] = lambda: layer(67, 67, (64, 1, 192, 128), importance="probs")
if HOPPER:
    PARTS["hopper"] = hopper


def launch_here(parts: Iterable[str]) -> set[str]:
    """The kernels that these parts launch."""
    launched = watch()
    for part in parts:
        PARTS[part]()
        if CUDA:
            torch.cuda.synchronize()
    return launched


def launch_in_process(part: str) -> set[str]:
    began = time.monotonic()
    done = subprocess.run([sys.executable, __file__, part], stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise SystemExit(f"{part}: exit status {done.returncode}")
    print(f"{part}: {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
    return set(json.loads(done.stdout.splitlines()[-1]))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("parts", nargs="*", metavar="part", help=f"only these: {', '.join(PARTS)}")
    parser.add_argument(
        "--jobs", type=int, default=os.cpu_count(), help="processes at a time; 0: all in this one"
    )
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.parts:
        print(json.dumps(sorted(launch_here(args.parts))))
        return
    if args.jobs:
        with ThreadPoolExecutor(args.jobs) as pool:
            # those that take longest come last
            launched = set().union(*pool.map(launch_in_process, reversed(PARTS)))
    else:
        launched = launch_here(PARTS)
    missing = {name for name, _ in all_kernels()} - launched
    if missing:
        raise SystemExit(f"never launched: {', '.join(sorted(missing))}")
    print(f"launched {len(launched)} kernels: {', '.join(sorted(launched))}")


if __name__ == "__main__":
    main()
