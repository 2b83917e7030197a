"""How good models with this layer become: bits per byte of text, against dense attention.

    python -m benchmarks.learning --data linux.txt.xz --work DIR     train, append rows
    python -m benchmarks.learning --data linux.txt.xz --speed        steps/s, nothing beside them
    python -m benchmarks.learning --table                            redraw training.md and sizes.md
    python -m benchmarks.learning --quick                            tiny sizes, nothing recorded

A byte-level Transformer for each variant of `variants.py`, on the text of `corpus.py`: dim 512,
depth 6, 8 query and 2 KV heads of 64, AdamW, bf16 autocast, cosine down to a tenth of the learning
rate. All variants of a seed see the same bytes in the same order and begin with the same values of
the weights that they share. The first seed tries every learning rate at the first length; the best
one is used for the other seeds and lengths. Each run is resumable, see `runs_pool.py`.

Rows (results/learning.jsonl): bits per byte of held-out text, over all positions, over the last
half and by ranges of positions; the training loss against bytes and seconds; and the needle: a
comment that tells a random number of a random name is put into held-out text at some depth. The
text ends with the same comment up to the number; the model is asked for each digit, given those
before.
"""

from __future__ import annotations

import functools
import itertools
import math
import statistics
import sys
import tempfile
from argparse import Namespace
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from native_sparse_attention import Transformer
from train_enwik8 import build_optimizer
from training.data import batches, windows
from training.forward import autocast, compiled, loss_of

from . import common, corpus, runs_pool, training
from .common import NO_ROWS, Row, length
from .runs_pool import Job, Run, on, sweep
from .variants import VARIANTS, Settings, build, check, describe, parsed, ranking_of, scaled

PLOT = common.ROOT / "docs" / "images" / "learning.png"
RESULTS = common.RESULTS / "learning.jsonl"
SHAPE = dict(num_tokens=256, dim=512, depth=6, heads=8, kv_heads=2, dim_head=64, causal=True)
LR = (1e-3, 5e-4, 2e-3)


@dataclass(frozen=True)
class Plan:
    """What to train."""

    variants: dict[str, Settings]
    data: dict[str, Any]
    lengths: tuple[int, ...] = (8192,)
    seeds: tuple[int, ...] = (0, 1, 2)
    lrs: tuple[float, ...] = LR
    train_bytes: int = 150_000_000
    step_tokens: int = 32768
    held_out_bytes: int = 4_000_000
    needles: int = 64
    warmup: int = 200
    points: int = 50
    precision: str = "bf16"
    compile: bool = False
    shape: dict[str, Any] = field(default_factory=lambda: dict(SHAPE))

    def __post_init__(self) -> None:
        for name in ("lengths", "seeds", "lrs", "variants"):
            if not getattr(self, name):
                raise ValueError(f"{name} must not be empty")
        for T in self.lengths:
            if T < 2 or self.step_tokens % T:
                raise ValueError(f"lengths must divide {self.step_tokens} tokens, got {T}")
        for name, settings in self.variants.items():
            check(name, settings, self.shape)

    def spec(self, kind: str, name: str, T: int, **others: Any) -> dict[str, Any]:
        found = dict(kind=kind, variant=name, settings=self.variants[name], T=T, shape=self.shape)
        names = ("warmup", "points", "held_out_bytes", "needles", "precision", "compile", "data")
        found |= {name: getattr(self, name) for name in names}
        found |= dict(batch=self.step_tokens // T, weight_decay=0.1, clip=1.0)
        return found | dict(steps=math.ceil(self.train_bytes / self.step_tokens)) | others

    def training(self, name: str, T: int, seed: int, lr: float) -> Job:
        spec = self.spec("train", name, T, seed=seed, lr=lr)
        return Job(f"{name}, T={T}, seed {seed}, lr {lr:g}", spec)

    def jobs(self, rows: list[Row]) -> list[Job]:
        def bits(row: Row) -> float:
            return row["bits"]["all"]

        names = list(self.variants)
        return sweep(names, self.lengths, self.seeds, self.lrs, self.training, bits, rows)

    def speeds(self, rows: list[Row]) -> list[Job]:
        """Steps of every variant that are timed."""
        pairs = itertools.product(self.lengths, self.variants)
        specs = [self.spec("speed", name, T, seed=0, lr=1e-4) for T, name in pairs]
        return [Job(f"speed of {spec['variant']}, T={spec['T']}", spec) for spec in specs]


# a run


def execute(spec: dict[str, Any], run: Run) -> Row:
    """Train or time one model: its row."""
    torch.set_float32_matmul_precision("high")
    train, held_out = corpus.mapped(Path(run.options["data"]))
    settings: Settings = spec["settings"]
    cfg = runs_pool.config(spec, run)
    cfg.compile = "on" if spec["compile"] else "off"
    model = build(settings, spec["shape"], spec["seed"]).to(run.device)
    forward = compiled(model, cfg)

    def loss_at(step: int) -> runs_pool.Losses:
        (ids,) = batches(train, cfg, step)
        given = ranking_of(settings, spec["seed"], step, run.device)
        return loss_of(functools.partial(forward, **given), on(ids, run.device), cfg)

    row = {**spec, **describe(model, spec["shape"], spec["T"])}
    if spec["kind"] == "speed":
        return {**row, **speed(model, loss_at, cfg, run.device)}
    if run.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    done = runs_pool.fit(model, loss_at, cfg, run)
    tokens = spec["batch"] * spec["T"]
    curve = [
        [int(step) * tokens, seconds, round(loss / math.log(2), 5)]
        for step, seconds, loss in done.curve
    ]
    cuda = run.device.type == "cuda"
    return {
        **row,
        "bits": evaluate(model, held_out, spec["held_out_bytes"], cfg),
        "needle": digits_found(model, held_out, spec["needles"], cfg),
        "schedule": f"warm-up of {spec['warmup']} steps, cosine to a tenth",
        "train_bytes": spec["steps"] * tokens,
        "seconds": round(done.seconds, 2),
        "tokens_per_s": round(spec["steps"] * tokens / done.seconds),
        "peak_mib": round(torch.cuda.max_memory_allocated() / 2**20) if cuda else None,
        "curve": curve,
    }


def speed(
    model: Transformer, loss_at: Callable[[int], runs_pool.Losses], cfg: Namespace,
    device: torch.device,
) -> Row:  # fmt: skip
    """Time of a step with nothing beside it."""
    optimizer = build_optimizer(model, cfg)

    def step() -> None:
        runs_pool.add_up(loss_at(1)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), cfg.clip)
        optimizer.step()
        optimizer.zero_grad()

    times = training.step_times(step, device)
    row = common.quantiles(times)
    per_s = round(cfg.batch_size * cfg.seq_len / row["p50_ms"] * 1e3)
    return {**row, "tokens_per_s": per_s, "repeats": len(times)}


def ranges(T: int) -> list[tuple[int, int]]:
    """Positions from 0 to T, bounded by powers of two."""
    edge = 256 if T >= 1024 else 16
    edges = [0]
    while edge < T:
        edges.append(edge)
        edge *= 2
    return list(itertools.pairwise([*edges, T]))


@torch.no_grad()
def evaluate(model: Transformer, data: np.ndarray, size: int, cfg: Namespace) -> Row:
    """Bits per byte of held-out text, in sequences of T spread evenly over about `size` bytes.
    Position i predicts a byte from the i + 1 bytes before it.

    Raises:
        ValueError: the held-out text is shorter than a sequence.
    """
    T = cfg.seq_len
    if len(data) <= T:
        raise ValueError(f"data has {len(data)} bytes of held-out text, T={T} needs more")
    count = max(1, min(size, len(data)) // T)
    starts = np.linspace(0, len(data) - T - 1, count).astype(np.int64)
    total = torch.zeros(T, dtype=torch.float64, device=cfg.device)
    for some in np.array_split(starts, math.ceil(count / cfg.batch_size)):
        ids = windows(data, some, cfg).to(cfg.device)
        with autocast(cfg):
            logits = model(ids[:, :-1])
        losses = F.cross_entropy(logits.float().transpose(1, 2), ids[:, 1:], reduction="none")
        total += losses.double().sum(0)
    bits = total / (count * math.log(2))

    def mean(begin: int, end: int) -> float:
        return round(bits[begin:end].mean().item(), 5)

    positions = {f"{begin}-{end}": mean(begin, end) for begin, end in ranges(T)}
    return {"all": mean(0, T), "last_half": mean(T // 2, T), "positions": positions}


# the needle

# of a needle
DEPTHS = (0.1, 0.5, 0.9)
DIGITS, NAME = 8, 10


def comment(draw: np.random.Generator) -> tuple[bytes, bytes]:
    """The text before a number, and the number."""
    name = bytes(draw.integers(97, 123, size=NAME).astype(np.uint8))
    number = bytes(draw.integers(48, 58, size=DIGITS).astype(np.uint8))
    return b"/* The number of " + name + b" is ", number


def context(text: np.ndarray, T: int, depth: float, draw: np.random.Generator) -> np.ndarray:
    """T bytes: held-out text with a needle, then the question and, at the end, the number."""
    before, number = comment(draw)
    needle, question = before + number + b" */\n", b"\n" + before + number
    left = T - len(needle) - len(question)
    start = int(draw.integers(len(text) - left))
    hay = text[start : start + left].tobytes()
    at = hay.rfind(b"\n", 0, round(depth * left)) + 1
    whole = hay[:at] + needle + hay[at:] + question
    return np.frombuffer(whole, dtype=np.uint8).astype(np.int64)


@torch.no_grad()
def digits_found(model: Transformer, text: np.ndarray, contexts: int, cfg: Namespace) -> Row:
    """By depth: the share of digits and of whole numbers whose most likely bytes are right, and
    bits per digit. The contexts of a depth are the same for all models of a length.

    Raises:
        ValueError: T is too short for a needle and some text.
    """
    T, by_depth = cfg.seq_len, {}
    least = 4 * (NAME + DIGITS) + 64
    if least > T or len(text) <= T:
        raise ValueError(f"T must be from {least} to the bytes of text={len(text)}, got {T}")
    for depth in DEPTHS:
        draw = np.random.default_rng([round(depth * 1000), T])
        rows = [context(text, T, depth, draw) for _ in range(contexts)]
        right, bits = [], []
        for first in range(0, contexts, cfg.batch_size):
            some = np.stack(rows[first : first + cfg.batch_size])
            ids = torch.from_numpy(some).to(cfg.device)
            with autocast(cfg):
                logits = model(ids[:, :-1])[:, -DIGITS:].float()
            answers = ids[:, -DIGITS:]
            right.append(logits.argmax(-1) == answers)
            bits.append(F.cross_entropy(logits.transpose(1, 2), answers, reduction="none"))
        hits = torch.cat(right).float()
        by_depth[f"{depth:g}"] = {
            "digits": round(hits.mean().item(), 4),
            "numbers": round(hits.min(1).values.mean().item(), 4),
            "bits": round(torch.cat(bits).mean().item() / math.log(2), 4),
        }
    return by_depth


# tables and plot

DENSE = "dense"
# the runs of a variant, one for each seed
Variants = dict[str, list[Row]]
# drawn in any case, and this many of the others
DRAWN, OTHERS = ("dense", "window", "paper", "published"), 3
# of different sizes
SIZED = (
    *("MLP over windows of 8", "MLP over windows of 8, 8 apart", "paper"),
    *("1088 keys, blocks of 16", "1088 keys, blocks of 32", "1088 keys"),
    *("one softmax, max of tokens, rotated", "window"),
)


def one_experiment(rows: Sequence[Row]) -> list[Row]:
    """Complete rows with the data, the bytes and the model of the last one."""
    rows = [row for row in rows if "failed" not in row]
    if not rows:
        return []

    def experiment(row: Row) -> tuple[str, int, str]:
        return row["data"]["sha256"], row["steps"] * row["batch"] * row["T"], str(row["shape"])

    return [row for row in rows if experiment(row) == experiment(rows[-1])]


def bits(row: Row) -> float:
    return row["bits"]["all"]


def settings_of(row: Row) -> dict[str, Any]:
    """The settings of a run. Those of "published" did not name its network while that was the
    library's default, which began with random weights then."""
    random = {"compress_mlp": {"name": "mlp", "start": "random"}}
    return (random if row["variant"] == "published" else {}) | row["settings"]


def chosen(rows: Sequence[Row], loss: Callable[[Row], float] = bits) -> list[Row]:
    """Of one variant's runs, the latest one of each seed with the chosen learning rate: that of the
    most seeds, of several that of the least loss. The settings are those of the last row."""
    by_lr: dict[float, dict[int, Row]] = {}
    for row in rows:
        if settings_of(row) == settings_of(rows[-1]):
            by_lr.setdefault(row["lr"], {})[row["seed"]] = row

    def rank(lr: float) -> tuple[int, float]:
        return -len(by_lr[lr]), mean(map(loss, by_lr[lr].values()))

    found = by_lr[min(by_lr, key=rank)]
    return [found[seed] for seed in sorted(found)]


def by_variant(rows: Sequence[Row], T: int) -> Variants:
    """Of the runs at a length, those of every variant, by bits per byte."""
    trained = [row for row in rows if row["kind"] == "train" and row["T"] == T]
    names = dict.fromkeys(row["variant"] for row in trained)
    found = {name: chosen([row for row in trained if row["variant"] == name]) for name in names}
    return dict(sorted(found.items(), key=lambda item: mean(map(bits, item[1]))))


def timed(rows: Sequence[Row], T: int, compiled: bool) -> dict[str, Row]:
    """Of each variant the latest row of a speed, with nothing beside it."""
    of_speed = (row for row in rows if row["kind"] == "speed" and row["T"] == T)
    return {row["variant"]: row for row in of_speed if row["compile"] == compiled}


def over_dense(rows: Sequence[Row], row: Row) -> float | None:
    """Tokens a second over those of dense attention on the same card and at the same commit."""
    where = row["gpu"], row["commit"]
    beside = [other for other in rows if (other["gpu"], other["commit"]) == where]
    dense = timed(beside, row["T"], row["compile"]).get(DENSE)
    return None if dense is None else row["tokens_per_s"] / dense["tokens_per_s"]


def speed_cell(rows: Sequence[Row], T: int, name: str) -> str:
    """Thousands of tokens a second, eager / compiled; in brackets times those of dense
    attention."""
    cells = []
    for row in (timed(rows, T, is_compiled).get(name) for is_compiled in (False, True)):
        if row is not None:
            ratio = None if name == DENSE else over_dense(rows, row)
            cell = f"{row['tokens_per_s'] / 1e3:.0f}"
            cells.append(cell if ratio is None else f"{cell} ({ratio:.2f})")
    return " / ".join(cells)


def mean(values: Iterable[float]) -> float:
    return statistics.fmean(values)


def spread(values: Sequence[float], digits: int = 3) -> str:
    """Mean and standard deviation."""
    told = f"{mean(values):.{digits}f}"
    return told if len(values) < 2 else f"{told} ± {statistics.stdev(values):.{digits}f}"


def keys(row: Row) -> str:
    return " + ".join(str(count) for count in row["keys_per_query"].values())


def minus_dense(runs: list[Row], dense: list[Row]) -> str:
    """The difference of runs of equal seeds."""
    twins = {row["seed"]: bits(row) for row in dense}
    pairs = [bits(row) - twins[row["seed"]] for row in runs if row["seed"] in twins]
    return spread(pairs) if pairs else ""


def digits(runs: list[Row]) -> list[str]:
    """Of the needle, the share of right digits at each depth."""
    depths = runs[0]["needle"]
    return [f"{mean(run['needle'][d]['digits'] for run in runs):.2f}" for d in depths]


def table_of(rows: Sequence[Row], T: int) -> str:
    variants = by_variant(rows, T)
    positions = next(iter(variants.values()))[0]["bits"]["positions"]
    shown = [name for name in positions if int(name.partition("-")[0]) >= T // 32]
    head = ["variant", "M parameters", "keys a query", "learning rate", "seeds"]
    head += [
        "bits per byte",
        "minus dense",
        "last half",
        *shown,
        "digits found",
        "thousand tokens/s (times dense), eager / compiled",
    ]
    lines = [head]
    for name, runs in variants.items():
        row = runs[0]
        cells = [name, f"{row['parameters'] / 1e6:.1f}", keys(row), f"{row['lr']:g}"]
        cells.append(str(len(runs)))
        cells.append(spread(list(map(bits, runs))))
        cells.append("" if name == DENSE else minus_dense(runs, variants.get(DENSE, [])))
        cells.append(spread([run["bits"]["last_half"] for run in runs]))
        cells += [f"{mean([run['bits']['positions'][p] for run in runs]):.3f}" for p in shown]
        cells.append(" / ".join(digits(runs)))
        cells.append(speed_cell(rows, T, name))
        lines.append(cells)
    return common.markdown(lines)


def lengths_of(rows: Sequence[Row]) -> list[int]:
    return sorted({row["T"] for row in rows if row["kind"] == "train"})


def table_of_runs(rows: Sequence[Row]) -> str:
    """For each length, the variants by their bits per byte."""
    rows = one_experiment(rows)
    if not lengths_of(rows):
        return NO_ROWS
    parts = [f"T = {T}:\n\n{table_of(rows, T)}" for T in lengths_of(rows)]
    last = [row for row in rows if row["kind"] == "train"][-1]

    where = f"{last['train_bytes'] / 1e6:.0f} MB of training text a run, {last['schedule']}; "
    where += f"text with SHA-256 {last['data']['sha256'][:12]}, {last['data']['bytes']} bytes. "
    where += f"{common.seen(rows, 'gpu')}, torch {common.seen(rows, 'torch')}, "
    where += f"triton {common.seen(rows, 'triton')}, commits {common.seen(rows, 'commit')}."
    return "\n\n".join([*parts, where])


def sizes(row: Row) -> list[str]:
    """l, d, s, blocks and w + 1 of the branches that a model has."""
    settings, branches = (
        row["settings"],
        row["settings"].get("branches", ["compressed", "selected", "window"]),
    )
    counts = (settings[f"num_{kind}_blocks"] for kind in ("initial", "local", "selected"))
    cells = [str(settings["compress_block_size"]), str(settings["compress_block_sliding_stride"])]
    cells += [str(settings["selection_block_size"]), " + ".join(map(str, counts))]
    if branches == ["window"]:
        cells = [""] * len(cells)
    return [*cells, str(settings["sliding_window_size"] + 1) if "window" in branches else ""]


def table_of_sizes(rows: Sequence[Row]) -> str:
    """What models of different sizes learn at each length, minus what dense attention does."""
    rows = one_experiment(rows)
    by_length = {T: by_variant(rows, T) for T in lengths_of(rows)}
    if not by_length:
        return NO_ROWS
    keys_at = f"keys a query, T = {min(by_length)}"
    head = ["variant", "l", "d", "s", "initial + local + n", "w + 1", keys_at]
    lines = [[*head, *(f"minus dense, T = {T}" for T in by_length)]]
    for name in SIZED:
        runs = next((variants[name] for variants in by_length.values() if name in variants), None)
        if runs is None:
            continue
        cells = [name, *sizes(runs[0]), keys(runs[0])]
        for variants in by_length.values():
            cells.append(minus_dense(variants.get(name, []), variants.get(DENSE, [])))
        lines.append(cells)
    return common.markdown(lines)


TABLES = {
    common.RESULTS / "training.md": {"learning": table_of_runs},
    common.ROOT / "docs" / "sizes.md": {"learning_sizes": table_of_sizes},
}


def draw(rows: Sequence[Row]) -> None:
    """Pages and plot."""
    common.draw_pages(TABLES, rows)
    if lengths_of(one_experiment(rows)):
        plot(one_experiment(rows))


def drawn(variants: Variants) -> Variants:
    """Those that are drawn in any case, and the best of the others."""
    others = [name for name in variants if name not in DRAWN][:OTHERS]
    return {name: runs for name, runs in variants.items() if name in (*DRAWN, *others)}


def points_by_position(runs: list[Row]) -> list[tuple[float, float]]:
    """(geometric mean of a range, bits per byte)"""
    found = []
    for name in runs[0]["bits"]["positions"]:
        begin, end = map(int, name.split("-"))
        value = mean([run["bits"]["positions"][name] for run in runs])
        found.append(((max(begin, end // 4) * end) ** 0.5, value))
    return found


def plot(rows: Sequence[Row]) -> None:
    """Bits per byte against the position, at each length."""
    lengths = lengths_of(rows)
    figure, axes = common.subplots(1, len(lengths), (6 * len(lengths), 4.6))
    for axis, T in zip(axes[0], lengths, strict=True):
        variants = drawn(by_variant(rows, T))
        for name, runs in variants.items():
            style = "o-" if name in DRAWN else "o--"
            axis.plot(*zip(*points_by_position(runs), strict=True), style, label=name)
        ends = [int(name.split("-")[1]) for name in runs[0]["bits"]["positions"]]
        axis.set_xscale("log", base=2)
        axis.set_xticks(ends, list(map(length, ends)))
        axis.set(title=f"held-out text, T = {length(T)}", xlabel="position", ylabel="bits per byte")
        axis.grid(alpha=0.3)
    axes[0][0].legend(fontsize=8)
    common.save(figure, PLOT)


# the command line


def table(rows: Sequence[Row]) -> str:
    """A line for each run."""
    lines = [["variant", "T", "seed", "lr", "bits per byte", "last half", "tokens/s", "seconds"]]
    for row in rows:
        cells = [row["variant"], str(row["T"])]
        if "failed" in row:
            lines.append([*cells, str(row["seed"]), f"{row['lr']:g}", row["failed"], "", "", ""])
        elif row["kind"] == "speed":
            lines.append([*cells, "", "", "", "", str(row["tokens_per_s"]), ""])
        else:
            bits = (f"{row['bits'][name]:.4f}" for name in ("all", "last_half"))
            measured = str(row["tokens_per_s"]), f"{row['seconds']:.0f}"
            lines.append([*cells, str(row["seed"]), f"{row['lr']:g}", *bits, *measured])
    return common.markdown(lines)


def quick_plan(args: Namespace, variants: dict[str, Settings], data: dict[str, Any]) -> Plan:
    shape = dict(SHAPE, dim=32, depth=4, heads=4, dim_head=16, ff_expansion_factor=2.0)
    small = {name: scaled(settings, 8) for name, settings in variants.items()}
    sizes: dict[str, Any] = dict(train_bytes=1280, step_tokens=320, held_out_bytes=320, needles=2)
    how: dict[str, Any] = dict(
        precision="fp32", points=2, warmup=1, shape=shape, compile=args.compile
    )
    lrs, seeds = args.lrs or (1e-3,), args.seeds or (0,)
    return Plan(small, data, (160,), tuple(seeds), tuple(lrs), **sizes, **how)


def write_quick_text(folder: Path) -> Path:
    words = np.random.default_rng(0).integers(97, 123, size=(64, 5)).astype(np.uint8)
    text = words[np.random.default_rng(1).integers(64, size=1000)]
    path = folder / "words.txt"
    path.write_bytes(np.pad(text, ((0, 0), (0, 1)), constant_values=32).tobytes())
    return path


def main(argv: list[str] | None = None) -> list[Row]:
    parser = runs_pool.parser_of("learning", __doc__)
    add = parser.add_argument
    add("--data", type=Path, help="the text of benchmarks.corpus, or any file of bytes; .xz too")
    add("--variants", nargs="+", choices=VARIANTS, metavar="NAME", help="all by default")
    add("--variant", action="append", default=[], metavar="NAME=JSON", help="one more, of settings")
    add("--lengths", type=int, nargs="+", default=[8192], metavar="T")
    add("--seeds", type=int, nargs="+", help="0 1 2 by default")
    add("--lrs", type=float, nargs="+", help="1e-3 5e-4 2e-3 by default")
    add("--bytes", type=int, default=150_000_000, help="to train on, each run")
    add("--compile", action="store_true", help="torch.compile with CUDA graphs")
    add("--speed", action="store_true", help="time steps instead, one run a GPU")
    args = parser.parse_args(argv)
    if args.table:
        rows = common.read_rows(args.out or RESULTS)
        draw(rows)
        return rows
    with tempfile.TemporaryDirectory(prefix="learning-") as temporary:
        try:
            return run(args, Path(temporary))
        except ValueError as error:
            sys.exit(f"benchmarks.learning: {error}")


def run(args: Namespace, temporary: Path) -> list[Row]:
    given = dict(map(parsed, args.variant))
    names = args.variants or ([] if given else list(VARIANTS))
    variants = {name: VARIANTS[name] for name in names} | given
    work = args.work or (temporary if args.quick else None)
    if work is None or not (args.quick or args.data):
        raise ValueError("work and data must be given to train, --work DIR --data FILE")
    path = corpus.unpacked(args.data or write_quick_text(temporary), work)
    about = corpus.about(path)
    if args.quick:
        plan = quick_plan(args, variants, about)
    else:
        plan = Plan(
            variants, about, tuple(args.lengths), tuple(args.seeds or (0, 1, 2)),
            tuple(args.lrs or LR), args.bytes, compile=args.compile,
        )  # fmt: skip
    options = dict(data=str(path.resolve()))
    out, device = common.out_of(args, RESULTS), torch.device(args.device)
    pool = runs_pool.Pool(execute, work, device, args.deadline, out, options)
    return runs_pool.report(pool, plan.speeds if args.speed else plan.jobs, table)


if __name__ == "__main__":
    main()
