"""The child of `against.py`: times the package that comes first on the path, and prints JSON. It is
run as a file and imports no other module of benchmarks by name, as the other tree has its own."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

SIZES: dict[str, Any] = dict(
    compress_block_size=32, compress_block_sliding_stride=16, selection_block_size=64,
    num_selected_blocks=13, num_initial_blocks=1, num_local_blocks=2, sliding_window_size=511,
)  # fmt: skip
# of H, K: the lengths
FULL = {(64, 4): (8192, 65536), (32, 8): (8192, 65536), (32, 32): (8192, 65536)}
QUICK = {(4, 2): (256,)}
BATCHES = (1, 16, 64)


def load_common() -> Any:
    spec = importlib.util.spec_from_file_location(
        "common_of_one_tree", Path(__file__).with_name("common.py")
    )
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def tensors(device: torch.device, dtype: torch.dtype, *shapes: tuple[int, ...]) -> list[Tensor]:
    generator = torch.Generator(device).manual_seed(0)
    return [torch.randn(shape, device=device, dtype=dtype, generator=generator) for shape in shapes]


def layer_calls(
    heads: tuple[int, int], T: int, width: int, device: torch.device, dtype: torch.dtype
) -> Iterator[tuple[str, Callable[[], Any]]]:
    """The ranking, the three branches and the gate: forward, and forward and backward."""
    from native_sparse_attention import native_sparse_attention

    (H, K), W = heads, T // 16
    *rows, gates, grad = tensors(
        device, dtype, (1, T, H, width), (1, T, K, width), (1, T, K, width), (1, W, K, width),
        (1, W, K, width), (1, T, H, 3), (1, T, H, width),
    )  # fmt: skip
    inputs = [t.requires_grad_() for t in (*rows, gates.sigmoid())]

    def forward() -> Tensor:
        out: Tensor = native_sparse_attention(*inputs, **SIZES, causal=True)
        return out

    def alone() -> None:
        with torch.no_grad():
            forward()

    yield "forward", alone
    yield "both", lambda: torch.autograd.grad(forward(), inputs, grad)


def decode_call(
    heads: tuple[int, int], B: int, S: int, width: int, device: torch.device, dtype: torch.dtype
) -> Callable[[], Any]:
    """A step of each of B sequences over S tokens."""
    from native_sparse_attention import decode_attention

    H, K = heads
    q, k, v, ck, cv, gates = tensors(
        device, dtype, (B, 1, H, width), (B, S, K, width), (B, S, K, width),
        (B, S // 16, K, width), (B, S // 16, K, width), (B, 1, H, 3),
    )  # fmt: skip
    lengths = torch.full((B,), S - 1, device=device, dtype=torch.int32)
    return lambda: decode_attention(q, k, v, ck, cv, gates.sigmoid(), lengths, **SIZES)


@torch.no_grad()
def main(root: str, device_name: str, quick: bool, seconds: float) -> None:
    import native_sparse_attention

    found = Path(native_sparse_attention.__file__).resolve()
    if Path(root).resolve() not in found.parents:
        sys.exit(f"the package is that of {found.parent}, not of {root}")
    common, device = load_common(), torch.device(device_name)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    width, times = (16 if quick else 128), {}

    def add(name: str, call: Callable[[], Any]) -> None:
        times[name] = common.time_call(call, seconds, device)["p50_ms"]
        common.release()

    for heads, lengths in (QUICK if quick else FULL).items():
        for T in lengths:
            for what, call in layer_calls(heads, T, width, device, dtype):
                with torch.enable_grad():
                    add(f"{what}, H={heads[0]} K={heads[1]}, T={T}", call)
    heads, S = ((4, 2), 256) if quick else ((64, 4), 65536)
    for B in BATCHES[: 1 if quick else None]:
        add(f"decode, B={B}, S={S}", decode_call(heads, B, S, width, device, dtype))
    print(json.dumps(times))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3] == "quick", float(sys.argv[4]))
