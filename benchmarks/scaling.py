"""What a training step sends, and how long it takes on 1 to 1024 GPUs: counted, not measured.

    python -m benchmarks.scaling    print the tables that benchmarks.distributed --table draws

The model is that of `benchmarks.distributed`, in bf16 with FSDP2, activation checkpointing and
context parallelism. Operations are those of `nsa_cost`; bytes are counted per collective. A GPU has
one link, which serves collectives in the order in which they begin. Where there are measured rows,
one GPU computes as fast as its row says, and the GPUs of a node send as fast as the fastest row.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch.nn import Module

from native_sparse_attention import NSAConfig, Transformer
from native_sparse_attention.blocks import ceil_div
from native_sparse_attention.cost import keys_read, nsa_cost
from native_sparse_attention.presets import preset

from . import common
from .common import Row

HEADS = dict(heads=32, kv_heads=4, dim_head=128)
FORM = "one softmax, mean query"
MODEL = dict(num_tokens=256, dim=2048, depth=16, causal=True, **HEADS)
# older commits, which `against` times, know no bits
MEAN_QUERY: dict[str, Any] = dict(importance="max") | (
    {"ranking_bits": 16} if hasattr(NSAConfig, "ranking_bits") else {}
)

# FLOP/s of an H200, whose limit is 794e12 in bf16: least squares over the rows of the mean query in
# the last run of results/clock.jsonl from 16k tokens on, all within 15%. "projections": with norms
# and activations. They and attention grow alike: its rate is of rows of an earlier run
RATES = dict(projections=422e12, attention=707e12, ranking=542e12)
# bytes/s that a GPU sends: NVLink 4 in one direction, and a 400 Gb/s adapter for each GPU of a node
NVLINK, ADAPTER, NODE = 450e9, 50e9, 8
# seconds of a hop, within and between nodes: NCCL's cost model of a ring (src/graph/tuning.cc)
HOP, NODE_HOP = 3.4e-6, 14e-6
# bytes of a weight that is gathered, of a gradient that is reduced, and of a key
WEIGHT, GRADIENT, KEY = 2, 4, 2

GPUS = (1, 2, 8, 64, 256, 1024)
# tokens of a row; context-parallel ranks, None for all; the fewest and the most GPUs
LINES: dict[str, tuple[int, int | None, int, int]] = {
    "256k tokens, dp": (2**18, 1, 1, 1024), "256k tokens, cp": (2**18, None, 1, 64),
    "1M tokens, cp": (2**20, None, 8, 256), "8M tokens, cp": (2**23, None, 64, 1024),
    "8M tokens, cp of 64, dp": (2**23, 64, 64, 1024),
}  # fmt: skip


@functools.cache
def model_of(T: int) -> Any:
    settings: dict[str, Any] = dict(MODEL, sparse_attn_kwargs=preset("one-softmax", T, MEAN_QUERY))
    with torch.device("meta"):
        return Transformer(use_sparse_attn=True, **settings)


def size_of(module: Module) -> int:
    return sum(p.numel() for p in module.parameters())


@functools.cache
def compute_seconds(net: Any, T: int) -> tuple[float, float, float]:
    """Of one GPU and a row of T tokens: a layer's forward, its backward, both of the logits."""
    config, feed_forward = net.layers[0][0].config, net.layers[0][1]
    cost, keys = nsa_cost(config, T).sparse, int(keys_read(torch.arange(T), T, config).sum())
    flops = 4 * config.dim_head * config.heads * keys
    attention, ranking = flops / RATES["attention"], cost.attention_flops - flops
    flops = sum(2 * T * p.numel() for p in feed_forward.parameters() if p.ndim == 2)
    projections = (cost.flops - cost.attention_flops + flops) / RATES["projections"]
    logits = 3 * 2 * T * net.to_logits.weight.numel() / RATES["projections"]
    forward = projections + attention + ranking / RATES["ranking"]
    return forward, 2 * projections + 2.5 * attention, logits


def layer_bytes(config: Any, n: int, cp: int) -> float:
    """What a rank of n tokens sends to gather the keys and values of a layer, which its branches
    share, or to reduce their gradients."""
    entries: float = n
    if "compressed" in config.branches:  # windows, and the tokens before each of two chunks
        overlap = ceil_div(config.compress_block_size - config.d, config.d) * config.d
        entries += n / config.d + 2 * overlap
    return (cp - 1) * 2 * config.kv_heads * config.dim_head * entries * KEY


def sent_bytes(net: Any, T: int, dp: int, cp: int) -> dict[str, float]:
    """What a rank sends in a step. The backward gathers weights of layers again, and keys for the
    recomputation; the other weights stay gathered."""
    share, layers = 1 - 1 / (dp * cp), sum(map(size_of, net.layers))
    others = size_of(net) - layers
    keys = len(net.layers) * layer_bytes(net.layers[0][0].config, T // cp, cp)
    return {
        "weights": share * (2 * layers + others) * WEIGHT,
        "gradients": share * (layers + others) * GRADIENT,
        "keys": 2 * keys, "gradients of keys": keys,
    }  # fmt: skip


def transfer_seconds(sent: float, ranks: int, nvlink: float, calls: int = 1) -> float:
    """Of rings in which each rank sends `sent` bytes in all."""
    nodes = ceil_div(ranks, NODE)
    bandwidth = nvlink if nodes == 1 else min(nvlink, NODE * ADAPTER)
    return sent / bandwidth + calls * ((ranks - nodes) * HOP + (nodes - 1) * NODE_HOP)


def simulate(
    net: Any, T: int, dp: int, cp: int, scale: float = 1.0, nvlink: float = NVLINK
) -> tuple[float, float]:
    """Seconds of a step of dp x cp GPUs, each row of T tokens on cp of them, and those of its
    computation. One GPU takes `scale` times as long as by `RATES`."""
    forward, backward, logits = (scale * t / cp for t in compute_seconds(net, T))
    depth, ranks, layer = len(net.layers), dp * cp, size_of(net.layers[0])
    others = size_of(net) - sum(map(size_of, net.layers))
    send = functools.partial(transfer_seconds, ranks=ranks, nvlink=nvlink)
    weights, gradients = (send((1 - 1 / ranks) * layer * width) for width in (WEIGHT, GRADIENT))
    sent = layer_bytes(net.layers[0][0].config, T // cp, cp)
    keys = transfer_seconds(sent, cp, nvlink, calls=2)

    # when the GPU, its link and the weights of the next layer are ready
    clock, link = 0.0, send((1 - 1 / ranks) * others * WEIGHT) + weights
    arrived = link
    for i in range(2 * depth):
        clock = max(clock, arrived)
        if cp > 1:  # the other half of the keys travels while a chunk attends to the first
            clock = max(clock, link) + keys / 2
            link = clock + keys / 2
            clock = max(clock, link - forward / 2)
        if i < 2 * depth - 1:
            arrived = link = max(clock, link) + weights
        clock += forward + (logits if i == depth - 1 else 0.0)
        if i >= depth:
            clock += backward
            if cp > 1:
                clock = link = max(clock, link) + keys
            link = max(clock, link) + gradients
    seconds = max(clock, link) + send((1 - 1 / ranks) * others * GRADIENT)
    return seconds, depth * (2 * forward + backward) + logits


# measured rows, and tables


def simulate_row(T: int, dp: int, cp: int, rows: Sequence[Row]) -> tuple[float, float]:
    """`simulate` at the speed of measured rows: of one GPU at T tokens or the most there are."""
    done = [row for row in rows if "step_ms" in row and row["form"] == FORM]
    alone = {row["T"]: row["step_ms"] / 1e3 for row in done if row["mode"] == "one"}
    at = T if T in alone else max(alone, default=T)
    scale = alone[at] / simulate(model_of(at), at, 1, 1)[0] if alone else 1.0
    speeds = [
        sum(sent_bytes(model_of(row["T"]), *sizes_of(row)).values()) / row["nccl_ms"] * 1e3
        for row in done if row["mode"] != "one" and row.get("nccl_ms")
    ]  # fmt: skip
    return simulate(model_of(T), T, dp, cp, scale, max(speeds, default=NVLINK))


def sizes_of(row: Row) -> tuple[int, int, int]:
    return row["T"], *((1, row["processes"]) if row["mode"] == "cp" else (row["processes"], 1))


def text_of(seconds: float, exposed: float, efficiency: float) -> str:
    return f"{common.number(seconds)} s, {efficiency:.0%}, {abs(exposed) * 1e3:.0f} ms"


def predict(T: int, dp: int, cp: int, rows: Sequence[Row]) -> str:
    seconds, compute = simulate_row(T, dp, cp, rows)
    return text_of(seconds, seconds - compute, compute / seconds)


def predictions(rows: Sequence[Row]) -> str:
    if not rows:
        return common.NO_ROWS
    lines = [["step, efficiency, exposed", "1 GPU", *(f"{gpus} GPUs" for gpus in GPUS[1:])]]
    for name, (T, ranks, least, most) in LINES.items():
        cells = [""] * len(GPUS)
        for i, gpus in enumerate(GPUS):
            if least <= gpus <= most:
                cells[i] = predict(T, gpus // (ranks or gpus), ranks or gpus, rows)
        lines.append([name, *cells])
    return common.markdown(lines)


def comparison(rows: Sequence[Row]) -> str:
    """Beside each measured step of several GPUs."""
    done = [row for row in rows if "step_ms" in row and row["form"] == FORM]
    alone = {row["T"]: row["tokens_per_s"] for row in done if row["mode"] == "one"}

    def cell(passes: dict[str, Row]) -> str:
        (row,) = passes.values()
        share = row["tokens_per_s"] / row["processes"] / alone.get(row["T"], float("nan"))
        found = text_of(row["step_ms"] / 1e3, row["exposed_ms"] / 1e3, share)
        return f"{predict(*sizes_of(row), rows)} / {found}"

    return common.grid(
        [row for row in done if row["mode"] != "one"], "predicted / measured",
        lambda row: f"{row['processes']} GPUs, {row['mode']}", lambda row: row["T"], cell,
    )  # fmt: skip


if __name__ == "__main__":
    found = common.read_rows(common.RESULTS / "distributed.jsonl")
    print(predictions(found), comparison(found), sep="\n\n")
