"""How good models with this layer become: bits per byte of text, against dense attention.

    python -m benchmarks.learning --data linux.txt --work DIR        train, append rows
    python -m benchmarks.learning --table                            redraw pages and plot
    python -m benchmarks.learning --quick                            tiny sizes, nothing recorded

A byte-level Transformer for each variant of `variants.py`, on the texts of `corpus.py`: dim 512,
depth 6, 8 query and 2 KV heads of 64, bf16 autocast, trained by a recipe of `recipe.py`. All
variants of a seed see the same bytes in the same order and begin with the same values of the
weights that they share. The first seed tries every learning rate at the first length; the best
one is used for the other seeds and lengths, for each text alone. Each run is resumable, see
`runs_pool.py`.

In this order, `--out` of its own for what only searches: (1) dense attention and local layers, T =
8192, 100 MB, five seeds, three texts; the recipe stands if seeds of dense attention deviate by at
most 0.01 bits, none by 0.03, and if at positions 0 to 256 it is within 0.01 of the best form. (2)
Forms at T = 8192 and 16384: three rates, the best at three seeds. (3) Cheaper rankings at T =
16384. (4) A model of 110 M: `--recipe muon,dim=1024,depth=10,heads=16,kv_heads=4`.

Rows (results/learning.jsonl): bits per byte of held-out text, over all positions, over the last
half and by ranges of positions, of the averaged and of the last weights; the training loss against
bytes and seconds; and the needle: a comment that tells a random number of a random name is put into
held-out text at some depth. The text ends with the same comment up to the number; the model is
asked for each digit, given those before. Tables add the reach: bits past position 2,048 minus those
from 256 to 1,024. They keep texts and recipes apart.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import math
from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from native_sparse_attention import Transformer
from training.batches import batches, windows
from training.forward import autocast, compiled, loss_of

from . import common, corpus, runs_pool
from .common import NO_ROWS, Row, length
from .recipe import RECIPES, Recipe, averaged, parsed
from .runs_pool import Job, Run, Variants, by_variant, on, spread, sweep
from .variants import VARIANTS, Settings, build, check, describe, ranking_of, scaled

PLOT = common.ROOT / "docs" / "images" / "learning.png"
SHAPE = dict(num_tokens=256, dim=512, depth=6, heads=8, kv_heads=2, dim_head=64, causal=True)
QUICK_TEXT = common.ROOT / "README.md"


@dataclass(frozen=True)
class Plan:
    """What to train: variants, by one recipe, on one text."""

    variants: dict[str, Settings]
    data: dict[str, Any]
    lengths: tuple[int, ...] = (8192,)
    seeds: tuple[int, ...] = (0, 1, 2)
    lrs: tuple[float, ...] = ()
    train_bytes: int = 100_000_000
    held_out_bytes: int = 4_000_000
    needles: int = 64
    points: int = 50
    precision: str = "bf16"
    compile: bool = False
    recipe: Recipe = RECIPES["muon"]
    base: dict[str, Any] = field(default_factory=lambda: dict(SHAPE))

    def __post_init__(self) -> None:
        for name in ("lengths", "seeds", "variants"):
            if not getattr(self, name):
                raise ValueError(f"{name} must not be empty")
        for T in (*self.lengths, *[self.recipe.short_tokens] * (self.recipe.short > 0)):
            if T < 2 or self.recipe.step_tokens % T:
                raise ValueError(f"lengths must divide {self.recipe.step_tokens} tokens, got {T}")
        for name, settings in self.variants.items():
            check(name, layer_settings(settings, self.recipe.qk_norm), self.shape)

    @property
    def shape(self) -> dict[str, Any]:
        return self.base | dict(self.recipe.shape)

    def training(self, name: str, T: int, seed: int, lr: float) -> Job:
        settings, tokens = self.variants[name], self.recipe.step_tokens
        spec = dict(kind="train", variant=name, settings=settings, T=T, seed=seed, lr=lr)
        names = ("shape", "points", "held_out_bytes", "needles", "precision", "compile", "data")
        spec |= {name: getattr(self, name) for name in names} | self.recipe.settings
        spec |= dict(batch=tokens // T, steps=math.ceil(self.train_bytes / tokens))
        return Job(f"{name}, {self.recipe.name}, T={T}, seed {seed}, lr {lr:g}", spec)

    def jobs(self, rows: list[Row]) -> list[Job]:
        names = list(self.variants)
        lrs = self.lrs or self.recipe.lrs
        return sweep(names, self.lengths, self.seeds, lrs, self.training, bits, rows)


def in_turn(lists: Sequence[list[Job]]) -> list[Job]:
    """The jobs of several plans, one of each after another."""
    return [job for jobs in itertools.zip_longest(*lists) for job in jobs if job is not None]


def layer_settings(settings: Settings, qk_norm: bool) -> Settings:
    return settings | (dict(qk_norm=True) if qk_norm else {})


# a run


def execute(spec: dict[str, Any], run: Run) -> Row:
    """Train and test one model: its row."""
    torch.set_float32_matmul_precision("high")
    train, held_out = corpus.mapped(Path(run.options[spec["data"]["sha256"]]))
    settings: Settings = spec["settings"]
    cfg = runs_pool.config(spec, run)
    cfg.compile = "on" if spec["compile"] else "off"
    model = build(layer_settings(settings, cfg.qk_norm), spec["shape"], spec["seed"])
    model, average = model.to(run.device), averaged(model.to(run.device), cfg)
    forward = compiled(model, cfg)
    tokens = spec["batch"] * spec["T"]
    rows = dict(seq_len=cfg.short_tokens, batch_size=tokens // cfg.short_tokens)
    short = Namespace(**vars(cfg) | rows)

    def loss_at(step: int) -> runs_pool.Losses:
        is_short = step <= cfg.short * cfg.steps
        cfg_of_step = short if is_short else cfg
        (batch,) = batches(train, cfg_of_step, step)
        given = ranking_of(settings, spec["seed"], step, cfg_of_step.seq_len, run.device)
        batch = batch._replace(ids=on(batch.ids, run.device))
        # one graph is compiled, for the length of the run
        return loss_of(functools.partial(model if is_short else forward, **given), batch, cfg)

    row = {**spec, **describe(model, spec["T"])}
    if run.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    done = runs_pool.fit(model, loss_at, cfg, run, average)
    curve = [
        [int(step) * tokens, seconds, round(loss / math.log(2), 5)]
        for step, seconds, loss in done.curve
    ]
    cuda = run.device.type == "cuda"
    if average is not None:
        row["bits_of_last_weights"] = evaluate(model, held_out, spec["held_out_bytes"], cfg)
        model.load_state_dict(average.module.state_dict())
    return {
        **row,
        "bits": evaluate(model, held_out, spec["held_out_bytes"], cfg),
        "needle": digits_found(model, held_out, spec["needles"], cfg),
        "train_bytes": spec["steps"] * tokens,
        "seconds": round(done.seconds, 2),
        "tokens_per_s": round(spec["steps"] * tokens / done.seconds),
        "peak_mib": round(torch.cuda.max_memory_allocated() / 2**20) if cuda else None,
        "curve": curve,
    }


def ranges(T: int) -> list[tuple[int, int]]:
    """Positions from 0 to T, bounded by powers of two."""
    first = 256 if T >= 1024 else 16
    edges = [first * 2**i for i in range(T.bit_length()) if first * 2**i < T]
    return list(itertools.pairwise([0, *edges, T]))


@torch.no_grad()
def evaluate(model: Transformer, data: np.ndarray, size: int, cfg: Namespace) -> Row:
    """Bits per byte of held-out text, in sequences of T spread evenly over about `size` bytes.
    Position i predicts a byte from the i + 1 bytes before it."""
    T = cfg.seq_len
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
    bits per digit. The contexts of a depth are the same for all models of a length. Raises
    ValueError: T is too short for a needle and some text."""
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
# of tables that users read; of the chart the first four
ONE = "1088 keys, blocks of 32"
LABELS = {
    f"{ONE}, any head, 8 bits": "one softmax, the preset",
    f"{ONE}, any head, 8 bits, layers 1 and 3 local": "layers 1 and 3 of 6 local",
    ONE: 'ranked by the mean query (importance="max"), 16 bits',
    f"{ONE}, index of 32": 'ranked by a learned index (importance="index")',
    f"{ONE}, any head": "the preset, in 16 bits",
    f"{ONE}, any head, 8 bits, layers 2 and 4 local": "layers 2 and 4 of 6 local",
    f"{ONE}, any head, 8 bits, R = 4": "4 tokens share a ranking (selection_stride)",
    f"{ONE}, 32 by any head, 8 bits, R = 4": "the same with 32 ranked blocks",
    f"{ONE}, any head, 8 bits, R = 16": "16 tokens share a ranking",
    f"{ONE}, any head, two stages": "two stages (num_selected_groups=16)",
    f"{ONE}, any head, 8 bits, one ranking for 2 layers": "2 layers share a ranking",
    f"{ONE}, any head, 8 bits, one ranking for 4 layers": "4 layers share a ranking",
    "MLP over windows of 8": "three branches, short windows",
}


def bits(row: Row) -> float:
    return row["bits"]["all"]


def mean_of(row: Row, begin: int, end: int) -> float:
    """Bits per byte at positions from `begin` to `end`."""
    total = 0.0
    for name, value in row["bits"]["positions"].items():
        first, last = map(int, name.split("-"))
        total += value * max(0, min(last, end) - max(first, begin))
    return total / (end - begin)


def reach(row: Row) -> float | None:
    """What far context is worth to a model: bits past position 2,048 minus those from 256 to 1,024,
    of the same run; None of shorter texts."""
    T = row["T"]
    return mean_of(row, 2048, T) - mean_of(row, 256, 1024) if T > 2048 else None


def by_text(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Of the complete runs with the recipe, the bytes and the model of the last one, those of each
    text, by its name."""

    def experiment(row: Row) -> tuple[str, int, str]:
        return row.get("recipe", "old"), row["steps"] * row["batch"] * row["T"], str(row["shape"])

    runs = [row for row in rows if row.get("kind") == "train" and "failed" not in row]
    texts = dict[str, list[Row]]()
    for row in runs:
        if experiment(row) == experiment(runs[-1]):
            text = row["data"].get("name", row["data"]["sha256"][:12])
            texts.setdefault(text, []).append(row)
    return texts


def by_length(runs: Sequence[Row]) -> dict[int, Variants]:
    lengths = sorted({row["T"] for row in runs})
    return {T: by_variant([row for row in runs if row["T"] == T], bits) for T in lengths}


def cells_of(runs: list[Row], dense: list[Row]) -> dict[str, str]:
    """A line of the table. Differences from dense attention are those of equal seeds."""
    row, twins = runs[0], {row["seed"]: bits(row) for row in dense}
    pairs = [bits(run) - twins[run["seed"]] for run in runs if run["seed"] in twins]
    reaches = [value for run in runs if (value := reach(run)) is not None]
    found = {
        "M parameters": f"{row['parameters'] / 1e6:.1f}",
        "keys a query": " + ".join(map(str, row["keys_per_query"].values())),
        "learning rate": f"{row['lr']:g}",
        "seeds": str(len(runs)),
        "bits per byte": spread(list(map(bits, runs))),
        "minus dense": spread(pairs) if pairs and row["variant"] != DENSE else "",
        "last half": spread([run["bits"]["last_half"] for run in runs]),
        "reach": spread(reaches) if reaches else "",
        "0-256": spread([mean_of(run, 0, min(256, row["T"])) for run in runs]),
        "seconds": spread([run["seconds"] for run in runs], 0),
    }
    for name in row["bits"]["positions"]:
        if int(name.partition("-")[0]) >= row["T"] // 32:
            found[name] = f"{fmean(run['bits']['positions'][name] for run in runs):.3f}"
    digits = (fmean(r["needle"][depth]["digits"] for r in runs) for depth in row["needle"])
    return found | {"digits found": " / ".join(f"{share:.2f}" for share in digits)}


def table_of_runs(rows: Sequence[Row]) -> str:
    """For each text and length, the variants by their bits per byte."""
    parts = [table_of_text(name, runs) for name, runs in by_text(rows).items()]
    return "\n\n".join(parts) or NO_ROWS


def table_of_text(text: str, rows: Sequence[Row]) -> str:
    parts, used, last = [], list[Row](), rows[-1]
    for T, variants in by_length(rows).items():
        lines = list[list[str]]()
        for name, runs in variants.items():
            cells = cells_of(runs, variants.get(DENSE, []))
            lines += [] if lines else [["variant", *cells]]
            lines.append([name, *cells.values()])
            used += runs
        parts.append(f"Text {text}, T = {T}:\n\n{common.markdown(lines)}")
    where = f"{last['train_bytes'] / 1e6:.0f} MB of training text a run, recipe {last['recipe']}; "
    where += f"text with SHA-256 {last['data']['sha256'][:12]}, {last['data']['bytes']} bytes. "
    return "\n\n".join([*parts, where + common.machine(used)])


def summary(rows: Sequence[Row], number: int | None = None, at: int = 0) -> str:
    """Of the shortest length of each text, or of length number `at`, the first forms of `LABELS`:
    differences from dense attention; the reach and seeds of each text."""
    texts = {text: [*by_length(runs).values()][at] for text, runs in by_text(rows).items()}
    lines = [["bits per byte", *texts, "reach", "seeds"]]
    for name in [DENSE, *LABELS][:number]:
        runs = [variants.get(name, []) for variants in texts.values()]
        twins = (variants.get(DENSE, []) for variants in texts.values())
        cells = [cells_of(*pair) if pair[0] else {} for pair in zip(runs, twins, strict=True)]
        column = "bits per byte" if name == DENSE else "minus dense"
        reaches = " / ".join(found.get("reach", "-").partition(" ")[0] for found in cells)
        found = [found.get(column, "") for found in cells]
        seeds = " / ".join(str(len(r)) for r in runs)
        lines += [[LABELS.get(name, name), *found, reaches, seeds]] if any(runs) else []
    return common.markdown(lines) if texts else NO_ROWS


TABLES: dict[Path, dict[str, Callable[[Sequence[Row]], str]]] = {
    common.RESULTS / "training.md": {"learning": table_of_runs},
    common.ROOT / "docs" / "training.md": {
        "learning summary": summary, "learning longer": functools.partial(summary, at=-1),
    },
    common.ROOT / "README.md": {"learning summary": functools.partial(summary, number=4)},
}  # fmt: skip


def plot(rows: Sequence[Row]) -> None:
    """Bits per byte minus those of dense attention with equal seeds, against the position: a panel
    for each text, at its shortest length."""
    panels: dict[str, Any] = {}
    for text, runs in by_text(rows).items():
        T, variants = next(iter(by_length(runs).items()))
        dense = {run["seed"]: positions(run) for run in variants.get(DENSE, ())}
        curves = panels[f"{text}, T = {length(T)}"] = dict[str, dict[float, list[float]]]()
        for name, label in [*LABELS.items()][:4]:
            for run in variants.get(name, ()):
                twin = dense.get(run["seed"], {})
                for at in twin:
                    points = curves.setdefault(label, {}).setdefault(at, [])
                    points.append(positions(run)[at] - twin[at])
    common.chart(panels, PLOT, "position", "bits minus dense", columns=3, is_log=False)


def positions(row: Row) -> dict[float, float]:
    """Bits per byte by the end of a range of positions."""
    return {int(name.partition("-")[2]): value for name, value in row["bits"]["positions"].items()}


# the program


def quick_plan(
    args: Namespace, variants: dict[str, Settings], data: dict[str, Any], recipe: Recipe
) -> Plan:
    shape = dict(SHAPE, dim=32, depth=4, heads=4, dim_head=16, ff_expansion_factor=2.0)
    small = {name: scaled(settings, 8) for name, settings in variants.items()}
    recipe = replace(recipe, step_tokens=320, short_tokens=32, warmup=1)
    return Plan(
        small, data, (160,), tuple(args.seeds or (0,)), tuple(args.lrs or (1e-3,)),
        train_bytes=1280, held_out_bytes=320, needles=2, points=2, precision="fp32",
        compile=args.compile, recipe=recipe, base=shape,
    )  # fmt: skip


def options(parser: argparse.ArgumentParser) -> None:
    runs_pool.options(parser)
    add = parser.add_argument
    add("--data", type=Path, nargs="+", help="texts of benchmarks.corpus, or any files of bytes")
    add("--recipe", nargs="+", default=["muon"], metavar="NAME,FIELD=VALUE", help="see recipe.py")
    add("--lengths", type=int, nargs="+", default=[8192], metavar="T")
    add("--bytes", type=int, default=100_000_000, help="to train on, each run")
    add("--compile", action="store_true", help="torch.compile with CUDA graphs")


def run(args: Namespace, recorder: common.Recorder) -> None:
    variants = runs_pool.variants_of(args, VARIANTS)
    if not (args.quick or args.data):
        raise ValueError("data must be given to train, --data FILE")
    paths = args.data or [QUICK_TEXT]
    texts = [{"name": path.stem, **corpus.about(path)} for path in paths]
    plans = [
        quick_plan(args, variants, text, recipe) if args.quick else Plan(
            variants, text, tuple(args.lengths), tuple(args.seeds or (0, 1, 2)),
            tuple(args.lrs or ()), args.bytes, compile=args.compile, recipe=recipe,
        )
        for recipe, text in itertools.product(map(parsed, args.recipe), texts)
    ]  # fmt: skip
    files = {text["sha256"]: str(path.resolve()) for text, path in zip(texts, paths, strict=True)}

    def jobs(rows: list[Row]) -> list[Job]:
        return in_turn([plan.jobs(rows) for plan in plans])

    with runs_pool.work_of(args) as work:
        pool = runs_pool.Pool(execute, work, recorder, args.deadline, files)
        runs_pool.run_all(pool, jobs)
        print(table_of_runs(recorder.rows))


BENCHMARK = common.Benchmark(
    "learning", __doc__, options, run, ("recipe", "variant", "T", "seed", "lr"), TABLES, plot
)
main = BENCHMARK.main

if __name__ == "__main__":
    main()
