"""The child of `against.py`: times one group of cases with the package that comes first on
the path.

    python benchmarks/one_tree.py TREE GROUP DEVICE SECONDS [quick]

Prints a JSON object, case -> {"ms": ...} or {"failed": ...}. It is run as a file, uses public names
of the package only, and loads its neighbours by path: the other tree has modules of their names.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor


def load(name: str) -> ModuleType:
    path = Path(__file__).with_name(f"{name}.py")
    spec = importlib.util.spec_from_file_location(f"{name}_of_one_tree", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


common, twin = load("common"), load("twin")

Call = Callable[[], Any]
# a name, and what is timed: a call, or a number of ms that was measured already
Case = tuple[str, Call | float]

SIZES: dict[str, Any] = dict(
    compress_block_size=32, compress_block_sliding_stride=16, selection_block_size=64,
    num_selected_blocks=13, num_initial_blocks=1, num_local_blocks=2, sliding_window_size=511,
)  # fmt: skip
# presets, and what is changed of them
PRESETS: dict[str, dict[str, int]] = {
    "paper": {}, "short-windows": {}, "one-softmax with dense_length=0": dict(dense_length=0),
}  # fmt: skip


class Sizes:
    """Of the whole run; `quick` is for a CPU."""

    def __init__(self, quick: bool, device: torch.device) -> None:
        self.device, self.quick = device, quick
        self.dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        heads = ((64, 4), (32, 8), (32, 32))
        self.operators = {(4, 2): (256,)} if quick else dict.fromkeys(heads, (8192, 65536))
        self.width = 16 if quick else 128
        self.dim, self.heads, self.kv_heads = (64, 4, 2) if quick else (4096, 32, 8)
        self.lengths = (256,) if quick else (8192, 16384, 65536)
        self.short = 128 if quick else 1024
        self.cached = 256 if quick else 16384
        self.batches = (1,) if quick else (1, 16, 64)
        self.decoded = 256 if quick else 65536
        self.repeats = 3 if quick else 50

    def draw(self, *shape: int) -> Tensor:
        generator = torch.Generator(self.device).manual_seed(0)
        return torch.randn(shape, device=self.device, dtype=self.dtype, generator=generator)


# what is timed


def layer_of(at: Sizes, preset: str, length: int) -> Any:
    """A layer of a preset, or the dense twin."""
    torch.manual_seed(0)
    if preset == "dense":
        layer: Any = twin.DenseAttention(at.dim, at.heads, at.kv_heads, at.width)
        return layer.to(at.device, at.dtype)
    from native_sparse_attention import NSAConfig, SparseAttention

    config = NSAConfig.preset(
        preset.split()[0], length, dim=at.dim, heads=at.heads, kv_heads=at.kv_heads,
        dim_head=at.width, causal=True, **PRESETS[preset],
    )  # fmt: skip
    return SparseAttention.from_config(config).to(at.device, at.dtype)


def passes(layer: Any, x: Tensor) -> Iterator[tuple[str, Call]]:
    d_out, weights = torch.ones_like(x), list(layer.parameters())

    def both() -> None:
        x.grad = None
        for weight in weights:
            weight.grad = None
        layer(x).backward(d_out)

    def forward() -> None:
        with torch.no_grad():
            layer(x)

    yield "forward", forward
    yield "both", both


def median_ms(at: Sizes, call: Call, is_host: bool) -> float:
    """Of repeated calls, the device idle at the start: until Python has control again, or until the
    device is done."""
    times = []
    for _ in range(at.repeats + 5):
        began = common.synchronize(at.device)
        call()
        ended = time.perf_counter() if is_host else common.synchronize(at.device)
        times.append((ended - began) * 1e3)
    return statistics.median(times[5:])


def operators(at: Sizes) -> Iterator[Case]:
    """The ranking, the three branches and the gate."""
    from native_sparse_attention import native_sparse_attention

    for (H, K), lengths in at.operators.items():
        for T in lengths:
            W, D = T // 16, at.width
            shapes = [(1, T, H, D), (1, T, K, D), (1, T, K, D), (1, W, K, D), (1, W, K, D)]
            inputs = [at.draw(*shape) for shape in shapes]
            inputs = [t.requires_grad_() for t in (*inputs, at.draw(1, T, H, 3).sigmoid())]
            d_out = at.draw(1, T, H, D)

            def call(inputs: list[Tensor] = inputs) -> Tensor:
                out: Tensor = native_sparse_attention(*inputs, **SIZES, causal=True)
                return out

            def forward(call: Any = call) -> None:
                with torch.no_grad():
                    call()

            def both(call: Any = call, inputs: Any = inputs, d_out: Any = d_out) -> None:
                torch.autograd.grad(call(), inputs, d_out)

            yield f"operator, forward, H={H} K={K}, T={T}", forward
            yield f"operator, both, H={H} K={K}, T={T}", both


def layers(at: Sizes) -> Iterator[Case]:
    for preset in ("dense", *PRESETS):
        for T in at.lengths:
            layer, x = layer_of(at, preset, T), at.draw(1, T, at.dim).requires_grad_()
            for name, call in passes(layer, x):
                yield f"layer, {preset}, {name}, T={T}", call


def host(at: Sizes) -> Iterator[Case]:
    """Time until Python has control again, the device idle at the start."""
    for preset in ("dense", *PRESETS):
        layer, x = layer_of(at, preset, at.short), at.draw(1, at.short, at.dim).requires_grad_()
        for name, call in passes(layer, x):
            yield f"host, {preset}, {name}, T={at.short}", median_ms(at, call, is_host=True)


def graphs(at: Sizes) -> Iterator[Case]:
    """A layer in a CUDA graph."""
    for preset in ("dense", *PRESETS):
        for T in (at.short, at.cached):
            layer, x = layer_of(at, preset, T), at.draw(1, T, at.dim).requires_grad_()
            if at.device.type == "cuda":
                layer = torch.cuda.make_graphed_callables(layer, (x,))
            for name, call in passes(layer, x):
                yield f"graph, {preset}, {name}, T={T}", call


def decoding(at: Sizes) -> Iterator[Case]:
    """A step of the operator over a cache of B sequences; of a layer, eager, over a cache."""
    from native_sparse_attention import KVCache, decode_attention

    H, K = (4, 2) if at.quick else (64, 4)
    for B in at.batches:
        S, D, W = at.decoded, at.width, at.decoded // 16
        stored = dict.fromkeys(("k", "v"), (B, S, K, D)) | dict.fromkeys(("ck", "cv"), (B, W, K, D))
        tensors = {name: at.draw(*shape) for name, shape in stored.items()}
        tensors |= dict(q=at.draw(B, 1, H, D), branch_gates=at.draw(B, 1, H, 3).sigmoid())
        tensors["lengths"] = torch.full((B,), S - 1, device=at.device, dtype=torch.int32)

        def operator(tensors: dict[str, Any] = tensors) -> None:
            decode_attention(**tensors, **SIZES)

        yield f"decode, operator, B={B}, S={S}", operator
        del tensors
    for preset in PRESETS:
        layer, token = layer_of(at, preset, at.cached), at.draw(1, 1, at.dim)
        cache = KVCache(at.cached + at.repeats + 8)
        layer(at.draw(1, at.cached, at.dim), cache=cache)
        step = functools.partial(layer, token, cache=cache)
        yield f"decode, layer, {preset}, S={at.cached}", median_ms(at, step, is_host=False)


def generation(at: Sizes) -> Iterator[Case]:
    """A Llama of transformers under `use_sparse_attention`: prefill, and a step of `generate`."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from native_sparse_attention.hf import use_sparse_attention

    sizes = dict(
        num_hidden_layers=4, hidden_size=4096, intermediate_size=14336, num_attention_heads=32,
        num_key_value_heads=8, head_dim=128, vocab_size=32000, max_position_embeddings=2**17,
    )  # fmt: skip
    if at.quick:
        sizes |= dict(num_hidden_layers=1, hidden_size=64, intermediate_size=64, vocab_size=64)
        sizes |= dict(num_attention_heads=4, num_key_value_heads=2, head_dim=16)
    special: Any = dict(bos_token_id=None, eos_token_id=None, pad_token_id=0)
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**sizes, **special)).to(at.device, at.dtype).eval()
    model = use_sparse_attention(model, dict(dense_length=0))
    T, new = (64, 10) if at.quick else (8192, 40)

    def seconds(ids: Tensor, count: int, **cache: Any) -> float:
        began = common.synchronize(at.device)
        model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=count,
            min_new_tokens=count, **cache,
        )  # fmt: skip
        return common.synchronize(at.device) - began

    for B in (1,) if at.quick else (1, 16):
        ids = torch.randint(sizes["vocab_size"], (B, T), device=at.device)
        yield f"llama, prefill, B={B}, T={T}", functools.partial(model, ids, logits_to_keep=1)
        for kind in ("dynamic", "static") if at.device.type == "cuda" else ("dynamic",):
            cache = {} if kind == "dynamic" else dict(cache_implementation="static")
            seconds(ids, new, **cache)
            whole = min(seconds(ids, new, **cache) for _ in range(2))
            short = min(seconds(ids, 2, **cache) for _ in range(2))
            yield f"llama, step, {kind}, B={B}, T={T}", (whole - short) / (new - 2) * 1e3


def first_call(at: Sizes) -> Iterator[Case]:
    """Forward and backward in a fresh process with an empty Triton cache; a call follows that finds
    all compiled."""
    layer, x = layer_of(at, "paper", at.short), at.draw(1, at.short, at.dim).requires_grad_()
    (_, both) = passes(layer, x)
    for name in ("first call", "call after it"):
        began = common.synchronize(at.device)
        with torch.enable_grad():
            both[1]()
        yield f"{name}, T={at.short}", (common.synchronize(at.device) - began) * 1e3


def first_compile(at: Sizes) -> Iterator[Case]:
    """The same through torch.compile."""
    for preset in ("dense", "paper"):
        layer = torch.compile(layer_of(at, preset, at.short), fullgraph=True)
        x = at.draw(1, at.short, at.dim).requires_grad_()
        began = common.synchronize(at.device)
        with torch.enable_grad():
            layer(x).square().sum().backward()
        yield f"first torch.compile, {preset}", (common.synchronize(at.device) - began) * 1e3


GROUPS: dict[str, Callable[[Sizes], Iterator[Case]]] = {
    "operators": operators,
    "layers": layers,
    "host": host,
    "graphs": graphs,
    "decoding": decoding,
    "generation": generation,
    "first_call": first_call,
    "first_compile": first_compile,
}


def measure(at: Sizes, group: str, seconds: float) -> dict[str, dict[str, Any]]:
    """The cases of a group. One that fails ends it, as those after it share what was built."""
    found: dict[str, dict[str, Any]] = {}
    last = f"{group}, its first case"
    with contextlib.ExitStack() as stack:
        # what runs in a graph is captured with gradients
        stack.enter_context(torch.no_grad() if group in ("decoding", "generation")
                            else torch.enable_grad())  # fmt: skip
        try:
            for last, case in GROUPS[group](at):
                ms = case
                if not isinstance(case, float):
                    ms = common.time_call(case, seconds, at.device)["p50_ms"]
                found[last] = {"ms": round(float(ms), 5)}  # type: ignore[arg-type]
                common.release()
        except Exception as error:
            found[f"{group}, after {last}" if last in found else last] = {
                "failed": common.why(error)
            }
    return found


def main(root: str, group: str, device: str, seconds: float, quick: bool) -> None:
    import native_sparse_attention

    package = Path(native_sparse_attention.__file__).resolve()
    if Path(root).resolve() not in package.parents:
        sys.exit(f"the package is that of {package.parent}, not of {root}")
    at = Sizes(quick, torch.device(device))
    print(json.dumps(measure(at, group, seconds)))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3], float(sys.argv[4]), "quick" in sys.argv[5:])
