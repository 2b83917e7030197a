"""The curves of a run: loss.png, TensorBoard events."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from .errors import UserError
from .runs import one_line, write


def draw(run: Path, records: list[dict[str, Any]]) -> None:
    """Bits per byte of training and validation against the step, to loss.png."""
    train = np.array([(r["step"], r["bpb"]) for r in records if "bpb" in r]).reshape(-1, 2)
    valid = np.array([(r["step"], r["val_bpb"]) for r in records if "val_bpb" in r]).reshape(-1, 2)
    train, valid = (curve[np.isfinite(curve).all(1)] for curve in (train, valid))
    figure = Figure(figsize=(8, 4.5), dpi=150, layout="constrained")
    axes = figure.subplots()
    if len(train):
        # a running mean over the past: sums of the last `width` losses
        width = max(1, len(train) // 40)
        sums = np.cumsum(train[:, 1])
        sums[width:] -= sums[:-width].copy()
        mean = sums / np.minimum(np.arange(1, len(train) + 1), width)
        axes.plot(train[:, 0], train[:, 1], color="#4c78a8", alpha=0.25, linewidth=0.8)
        axes.plot(train[:, 0], mean, color="#4c78a8", linewidth=1.6, label="train, running mean")
    red = "#e45756"
    axes.plot(
        valid[:, 0], valid[:, 1], "o-", color=red, markersize=3.5, label="validation", clip_on=False
    )
    where: Any = {"xytext": (0, 8), "textcoords": "offset points", "ha": "right"}
    if len(valid):
        axes.annotate(f"{valid[-1, 1]:.3f}", valid[-1], color=red, weight="bold", **where)
    axes.set_title(one_line(run.name), parse_math=False)
    axes.set(xlabel="step", ylabel="bits per byte", ylim=(0, None))
    axes.set_xlim(0, max(1, records[-1]["step"]))
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="upper right", frameon=False)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    write(run / "loss.png", buffer.getvalue())


def tensorboard() -> Any:
    """The class that writes TensorBoard events."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise UserError("--tensorboard needs the package tensorboard, not installed") from None
    return SummaryWriter
