"""Wall time of layers and of whole models against dense attention: the chart of the README.

    python -m benchmarks.clock                           every subject and length, append rows
    python -m benchmarks.clock --subjects transformer    those of the chart
    python -m benchmarks.clock --modes eager graph       layers in a CUDA graph, too
    python -m benchmarks.clock --table                   redraw the chart and docs/performance.md
    python -m benchmarks.clock --quick                   small, nothing recorded

Subjects: a layer with 32/8 or 64/4 heads of 128, a `Transformer` of 4 layers, and a Llama of 1 B of
transformers under `use_sparse_attention`, which checkpoints activations. In bf16, of one sequence,
by the clock, the medians of 5 calls: of both passes, or a training step; and of a forward without
gradients, or a prefill. Dense attention is the same subject with SDPA. "host": until Python has
control again. Before a form is timed, its outputs, and the gradients of a layer, are held against
its own weights in fp32 on the eager backend: at most twice the error of that backend in bf16.
"""

from __future__ import annotations

import argparse
import copy
import functools
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from native_sparse_attention import SparseAttention, Transformer, recipes
from native_sparse_attention.compress import MeanPool
from native_sparse_attention.presets import preset

from . import common, generation, oracle
from .common import NO_ROWS, Row, WrongResult
from .scaling import MEAN_QUERY

PAGE = common.ROOT / "docs" / "performance.md"
PLOT = common.ROOT / "docs" / "images" / "clock.png"

MEANS = dict(importance="logits", compress_block_size=32, compress_block_sliding_stride=16)
# of each form the preset and what replaces its settings
FORMS: dict[str, tuple[str, dict[str, Any]]] = {
    "dense": ("one-softmax", dict(num_selected_blocks=0)),
    "one softmax": ("one-softmax", {}),
    "one softmax, 16 bits": ("one-softmax", dict(ranking_bits=16)),
    "one softmax, mean query": ("one-softmax", MEAN_QUERY),
    "one softmax, ranked by means": ("one-softmax", MEANS),
    "three branches": ("paper", dict(
        importance="logits", branch_kv="shared", compress_mlp=MeanPool()
    )),
    "short windows": ("short-windows", {}),
}  # fmt: skip
# of whole models: every second layer takes the block indices of the one before
SHARED = "one softmax, a ranking for 2 layers"
# of the drop-in, which has 16 bits by default
DROP_IN: dict[str, dict[str, Any]] = {
    "dense": {},
    "one softmax": dict(ranking_bits=8),
    SHARED: dict(ranking_bits=8),
    "one softmax, 16 bits": {},
    "one softmax, mean query": MEAN_QUERY,
    "one softmax, ranked by means": MEANS,
}
HEADS = {"layer, 32/8": (32, 8), "layer, 64/4": (64, 4)}
SUBJECTS = (*HEADS, "transformer", "llama")
CHARTED = "transformer"
LINES = ("dense", "one softmax", "one softmax, ranked by means", "three branches")
LAYER = dict(dim=4096, dim_head=128, causal=True)
MODEL = dict(num_tokens=256, dim=2048, depth=4, heads=16, kv_heads=4, dim_head=128, causal=True)
QUICK: dict[str, dict[str, Any]] = {
    "layer": dict(dim=64, dim_head=16),
    "transformer": dict(dim=64, depth=2, dim_head=16),
}  # fmt: skip
LENGTHS = (4096, 8192, 16384, 32768, 65536, 131072)
MODES = ("eager", "compiled", "graph")
# tokens of the check, which eager PyTorch can run
CHECKED = 2048
# a softmax does not see what all its keys have in common: the exact gradient is nearly 0
ZERO = "dk_intrablock_positions"


def forms_of(subject: str) -> Sequence[str]:
    more = [SHARED] if subject == "transformer" else []
    return [*DROP_IN] if subject == "llama" else [*FORMS, *more]


def make(subject: str, form: str, T: int, quick: bool) -> nn.Module:
    """A subject with a form of attention for sequences of T tokens, with weights by seed 0."""
    torch.manual_seed(0)
    if subject == "llama":
        from native_sparse_attention.hf import use_sparse_attention

        shape = "tiny" if quick else "llama-1b"
        net = generation.network_of(shape, None, torch.device("cpu"), torch.float32).train()
        enable = getattr(net, "activation_checkpointing_enable", None)  # since 5.24
        (enable or net.gradient_checkpointing_enable)(dict(use_reentrant=False))
        net.config.use_cache = False
        if form == "dense":
            return net
        shared = range(0, net.config.num_hidden_layers, 2) if form == SHARED else None
        return use_sparse_attention(net, DROP_IN[form], share_ranking=shared)
    small = QUICK[subject.partition(",")[0]] if quick else {}
    name, changes = FORMS.get(form, ("one-softmax", {}))
    settings = preset(name, T, changes)
    if subject == "transformer":
        model: dict[str, Any] = dict(MODEL, use_sparse_attn=True, sparse_attn_kwargs=settings)
        shared = range(0, (model | small)["depth"], 2) if form == SHARED else None
        net = Transformer(**model | small, share_ranking=shared)
    else:
        heads, kv_heads = HEADS[subject]
        heads, kv_heads = (4, 2) if quick else (heads, kv_heads)
        sizes = dict(LAYER, sliding_window_size=0, heads=heads, kv_heads=kv_heads)
        net = SparseAttention(**sizes | small | settings)
    if form == "dense":
        recipes.set_dense(net, True)
    return net


def passes_of(subject: str) -> tuple[str, str]:
    return ("both passes", "forward") if subject in HEADS else ("training step", "prefill")


def draw(subject: str, net: Any, T: int, device: torch.device) -> Tensor:
    """Inputs of a layer [1 T dim], or ids [1 T]."""
    if subject in HEADS:
        return torch.randn(1, T, net.config.dim, device=device, dtype=torch.bfloat16)
    return torch.randint(0, 256, (1, T), device=device)


# the oracle


def outputs(subject: str, net: Any, x: Tensor) -> dict[str, Tensor]:
    """Of a layer its output, and the gradients of its input and weights; of a model its logits."""
    if subject not in HEADS:
        with torch.no_grad():
            out = net(x)
        return {"logits": out if isinstance(out, Tensor) else out.logits}
    x = x.detach().requires_grad_()
    net.zero_grad(set_to_none=True)
    out = net(x)
    out.backward(x.detach().flip(1))
    grads = {f"d{name}": p.grad for name, p in net.named_parameters() if p.grad is not None}
    net.zero_grad(set_to_none=True)
    return {"out": out.detach(), "dx": x.grad, **grads}  # type: ignore[dict-item]


def check(subject: str, net: Any, x: Tensor) -> float:
    """The largest error as a share of its budget, at lengths without dense queries."""
    low = copy.deepcopy(net)
    if subject == "llama":
        from native_sparse_attention.hf import use_sparse_attention

        if low.config._attn_implementation == "nsa":
            kept = {*MEANS, "ranking_bits"}
            settings = {n: v for n, v in low.config.nsa_config.items() if n in kept}
            net = use_sparse_attention(copy.deepcopy(net), settings, dense_length=0)
            use_sparse_attention(low, settings, dense_length=0, backend="eager")
    else:
        net = copy.deepcopy(net)
        for copied, backend in ((net, "auto"), (low, "eager")):
            for layer in copied.modules():
                if isinstance(layer, SparseAttention):
                    layer.backend, layer.dense_length = backend, 0
    exact = copy.deepcopy(low).float()
    wide = x if x.dtype == torch.int64 else x.float()
    right, got, eager = (outputs(subject, n, t) for n, t in ((exact, wide), (net, x), (low, x)))
    return largest_share(right, got, eager)


def largest_share(
    right: dict[str, Tensor], got: dict[str, Tensor], eager: dict[str, Tensor]
) -> float:
    names = [name for name in right if name != ZERO]
    shares = [oracle.share_of_budget(n, got[n], right[n].double(), eager[n]) for n in names]
    return round(max(shares), 3)


# times


def calls_of(subject: str, net: Any, x: Tensor) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """Both passes and a forward, in the order of `passes_of`."""
    if subject in HEADS:
        x, d_out = x.requires_grad_(), torch.ones_like(x)
    prompt = x[:, 1:] if subject == "transformer" else x

    def both() -> None:
        if subject in HEADS:
            net(x).backward(d_out)
            x.grad = None
        elif subject == "llama":
            net(x, labels=x).loss.backward()
        else:
            net(x, return_loss=True).backward()
        net.zero_grad(set_to_none=True)

    def forward() -> None:
        with torch.no_grad():
            net(prompt, **(dict(logits_to_keep=1) if subject == "llama" else {}))

    return both, forward


def measure(subject: str, form: str, mode: str, T: int, quick: bool, device: torch.device) -> Row:
    """Medians in ms of both passes and of a forward, and the peak memory of both passes."""
    net: Any = make(subject, form, T, quick).to(device, torch.bfloat16)
    # the loss of a Transformer predicts all tokens but the first
    x = draw(subject, net, T + (subject == "transformer"), device)
    if mode == "compiled":
        net = torch.compile(net)
    elif mode == "graph":
        net = torch.cuda.make_graphed_callables(net, (x.requires_grad_(),))
    row: Row = {}
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    for name, call in zip(passes_of(subject), calls_of(subject, net, x), strict=True):
        times = []
        for _ in range(8):
            began = common.synchronize(device)
            call()
            returned, ended = time.perf_counter(), common.synchronize(device)
            times.append(((ended - began) * 1e3, (returned - began) * 1e3))
        wall, host = (statistics.median(kind[3:]) for kind in zip(*times, strict=True))
        row |= {name: round(wall, 3), f"{name}, host": round(host, 3)}
    if device.type == "cuda":
        row["peak_mib"] = round(torch.cuda.max_memory_allocated() / 2**20)
    return row


# tables and the chart


def last_run(rows: Sequence[Row], subject: str, mode: str = "eager") -> list[Row]:
    """Of the last run with this subject and mode."""
    some = [row for row in rows if (row["subject"], row["mode"]) == (subject, mode)]
    return [row for row in some if row["run"] == some[-1]["run"]]


def table_of(rows: Sequence[Row], subject: str, mode: str = "eager") -> str:
    """Milliseconds; brackets: times as fast as dense attention."""
    run = last_run(rows, subject, mode)
    dense = {row["T"]: row for row in run if row["form"] == "dense"}
    cells = [row | {"what": name} for name in passes_of(subject) for row in run]

    def cell(passes: dict[str, Row]) -> str:
        (row,) = passes.values()
        ms, base = row[row["what"]], dense.get(row["T"], {}).get(row["what"])
        ratio = f" ({base / ms:.2f})" if base and row["form"] != "dense" else ""
        return common.number(ms) + ratio

    return common.grid(
        cells, "ms (times as fast as dense)", lambda row: f"{row['what']}, {row['form']}",
        lambda row: row["T"], cell,
    ) if run else NO_ROWS  # fmt: skip


TABLES = {PAGE: {
    "clock": functools.partial(table_of, subject=CHARTED),
    "clock layer": functools.partial(table_of, subject="layer, 32/8"),
    "clock llama": functools.partial(table_of, subject="llama"),
}}  # fmt: skip


def plot(rows: Sequence[Row]) -> None:
    """ms against length, a panel for each pass, a line for each form of `LINES`."""
    panels: dict[str, dict[str, dict[float, float]]] = {n: {} for n in passes_of(CHARTED)}
    for row in last_run(rows, CHARTED):
        for name in panels:
            if name in row and row["form"] in LINES:
                panels[name].setdefault(row["form"], {})[row["T"]] = row[name]
    common.chart(panels, PLOT, "tokens of the sequence", "ms")


def options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--lengths", type=int, nargs="+", default=list(LENGTHS))
    add("--subjects", nargs="+", choices=SUBJECTS, default=SUBJECTS)
    add("--forms", nargs="+", choices=[*FORMS, SHARED], default=[*FORMS, SHARED])
    add("--modes", nargs="+", choices=MODES, default=["eager"], help="graphs are of layers")


def run(args: argparse.Namespace, recorder: common.Recorder) -> None:
    device, known = args.device, {"run": time.strftime("%Y%m%dT%H%M%S")}
    lengths, checked = ([128], 128) if args.quick else (args.lengths, CHECKED)
    for subject in args.subjects:
        for form in [form for form in forms_of(subject) if form in args.forms]:
            net: Any = make(subject, form, checked, args.quick).to(device, torch.bfloat16)
            head = {"subject": subject, "form": form}
            try:
                share = check(subject, net, draw(subject, net, checked, device))
            except WrongResult as error:
                recorder.add({**head, **known, "failed": f"wrong: {error}"})
                continue
            finally:
                del net
                common.release()
            for mode in [mode for mode in args.modes if mode != "graph" or subject in HEADS]:
                for T in lengths:
                    call = functools.partial(measure, subject, form, mode, T, args.quick, device)
                    row = common.attempt(call, device)
                    more = {"mode": mode, "T": T, "error_share": share}
                    recorder.add({**head, **more, **row, **known})
                    common.release()


FIELDS = ("subject", "form", "mode", "T")
BENCHMARK = common.Benchmark("clock", __doc__, options, run, FIELDS, TABLES, plot)
main = BENCHMARK.main

if __name__ == "__main__":
    main()
