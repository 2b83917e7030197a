"""Wall time of a whole model against the length of a sequence: the chart of the README.

    python -m benchmarks.model              time every form at every length, append rows
    python -m benchmarks.model --table      redraw the chart and the table of docs/performance.md
    python -m benchmarks.model --quick      a small model, nothing recorded

A training step is the forward and backward pass of the loss of one sequence, a prefill a forward
without gradients; both eager, in bf16, by the clock. Before a form is timed, its logits are held
against its own weights in fp32 on the eager backend: at most twice the error of that backend in
bf16.
"""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from native_sparse_attention import Transformer
from native_sparse_attention.compress import MeanPool
from native_sparse_attention.presets import preset

from . import common
from .common import NO_ROWS, Row, WrongResult, length

RESULTS = common.RESULTS / "model.jsonl"
PAGE = common.ROOT / "docs" / "performance.md"
PLOT = common.ROOT / "docs" / "images" / "model.png"

MODEL = dict(num_tokens=256, dim=2048, depth=4, heads=16, kv_heads=4, dim_head=128, causal=True)
QUICK = dict(MODEL, dim=64, depth=2, dim_head=16)
LENGTHS = (4096, 8192, 16384, 32768, 65536, 131072)
# tokens of the check, which eager PyTorch can run
CHECKED = 2048
PASSES = ("training step", "prefill")


def sparse(name: str, **settings: Any) -> Callable[[dict[str, Any], int], Transformer]:
    def make(model: dict[str, Any], T: int) -> Transformer:
        kwargs = preset(name, T, settings)
        return Transformer(**model, use_sparse_attn=True, sparse_attn_kwargs=kwargs)

    return make


FORMS: dict[str, Callable[[dict[str, Any], int], Transformer]] = {
    "dense": lambda model, T: Transformer(**model),
    "one softmax": sparse("one-softmax"),
    "one softmax, ranked by means": sparse(
        "one-softmax", importance="logits", compress_block_size=32, compress_block_sliding_stride=16
    ),
    "three branches": sparse(
        "paper", importance="logits", branch_kv="shared", compress_mlp=MeanPool()
    ),
}


def check(net: Transformer, ids: Tensor) -> None:
    """Raises WrongResult where logits in bf16 err more than twice as much as on eager PyTorch."""
    twin = copy.deepcopy(net)
    for attention, _ in twin.layers:
        attention.backend = "eager"
        attention.dense_length = net.layers[0][0].dense_length = 0
    low = twin(ids).float()
    exact = twin.float()(ids)
    errors = [(logits.float() - exact).norm() / exact.norm() for logits in (net(ids), low)]
    if not errors[0] <= 2 * errors[1]:
        raise WrongResult(f"logits err by {errors[0]:.1e}, eager bf16 by {errors[1]:.1e}")


def measure(form: str, T: int, model: dict[str, Any], device: torch.device) -> Row:
    """Medians in ms of both passes, and the peak memory of a training step."""
    torch.manual_seed(0)
    net = FORMS[form](model, T).to(device, torch.bfloat16)
    ids = torch.randint(0, model["num_tokens"], (1, T + 1), device=device)

    def train() -> None:
        net(ids, return_loss=True).backward()
        net.zero_grad(set_to_none=True)

    def prefill() -> None:
        with torch.no_grad():
            net(ids[:, :-1])

    row: Row = {}
    for name, call in zip(PASSES, (train, prefill), strict=True):
        times = []
        for _ in range(8):
            began = common.synchronize(device)
            call()
            times.append((common.synchronize(device) - began) * 1e3)
        row[name] = round(statistics.median(times[3:]), 3)
    if device.type == "cuda":
        row["peak_mib"] = round(torch.cuda.max_memory_allocated() / 2**20)
    return row


def latest(rows: Sequence[Row]) -> dict[tuple[str, int], Row]:
    """The rows of the last run, by form and length."""
    return {(row["form"], row["T"]): row for row in rows if row["run"] == rows[-1]["run"]}


def table(rows: Sequence[Row]) -> str:
    """Milliseconds; brackets: times as fast as dense attention."""
    if not rows:
        return NO_ROWS
    found = latest(rows)
    lengths = sorted({T for _, T in found})
    lines = [["ms (times as fast as dense)", *(length(T) for T in lengths)]]
    for name in PASSES:
        for form in dict.fromkeys(form for form, _ in found):
            cells = []
            for T in lengths:
                row, dense = found[form, T], found["dense", T]
                ratio = f" ({dense[name] / row[name]:.2f})" if form != "dense" else ""
                cells.append(f"{common.number(row[name])}{ratio}" if name in row else "failed")
            lines.append([f"{name}, {form}", *cells])
    where = "{gpu}, torch {torch}, triton {triton}, commit {commit}.".format(**rows[-1])
    return f"{common.markdown(lines)}\n\n{where}"


TABLES = {PAGE: {"model": table}}


def plot(rows: Sequence[Row]) -> None:
    """Seconds against length, log-log: a panel for each pass, a line for each form."""
    found = latest(rows)
    lengths = sorted({T for _, T in found})
    figure, axes = common.subplots(1, len(PASSES), (9, 3.4))
    for axis, name in zip(axes[0], PASSES, strict=True):
        for form in dict.fromkeys(form for form, _ in found):
            axis.plot(lengths, [found[form, T][name] for T in lengths], marker="o", label=form)
        common.log_log(axis, lengths, "tokens of the sequence", "ms")
        axis.set_title(name)
    handles, labels = axes[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right center", frameon=False)
    common.save(figure, PLOT)


def draw(rows: Sequence[Row]) -> None:
    common.draw_pages(TABLES, rows)
    if rows:
        plot(rows)


def main(argv: list[str] | None = None) -> list[Row]:
    parser = common.parser_of("model", __doc__, seconds=None)
    parser.add_argument("--lengths", type=int, nargs="+", default=list(LENGTHS))
    args = parser.parse_args(argv)
    if args.table:
        rows = common.read_rows(args.out or RESULTS)
        draw(rows)
        return rows
    device, out = torch.device(args.device), common.out_of(args, RESULTS)
    model, lengths, checked = MODEL, args.lengths, CHECKED
    if args.quick:
        model, lengths, checked = QUICK, [256], 256
    known = {"run": time.strftime("%Y%m%dT%H%M%S"), **common.environment(device)}
    rows = []
    for form, make in FORMS.items():
        net = make(model, checked).to(device, torch.bfloat16)
        if form != "dense":
            with torch.no_grad():
                check(net, torch.randint(0, model["num_tokens"], (1, checked), device=device))
        del net
        for T in lengths:
            common.release()
            row = common.attempt(lambda f=form, n=T: measure(f, n, model, device), device)
            rows.append({"form": form, "T": T, **row, **known})
            print(form, T, row, flush=True)
            common.append_row(out, rows[-1])
    return rows


if __name__ == "__main__":
    main()
