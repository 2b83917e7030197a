"""A trained model converted to sparse attention: before and after its ranking and weights learn.

    python -m benchmarks.distillation --data DIR --model FILE.gguf    append rows
    python -m benchmarks.distillation --table    redraw results/training.md from the rows
    python -m benchmarks.distillation --quick    a tiny random model, nothing recorded

The model is that of `pretrained.py`, its texts are evaluated in the same way, at one length T.
Training texts are rows of the files that no evaluation reads, as many of each kind of text, drawn
in one order by a seed. AdamW on fp32 weights, bf16 autocast on a GPU. Blocks hold 64 initial, 512
local and 512 ranked tokens. Forms:

* dense: the model's own attention; "dense, tuned": after `--steps` steps of next tokens.
* index: a learned ranking as `convert` begins it, by the greatest logit of a token, untrained;
  "index, ranking": after `--ranking-steps` of `distill(stage="ranking")`; "index, all": then after
  `--steps` of `distill(stage="all")`.
* "max, tuned": a ranking by the greatest logit that learns nothing, after `--steps`.

above: mean loss of a text's second half beyond that of dense, with its standard error over texts;
above_tuned: beyond that of "dense, tuned". found: needles by depth. caught: share of the far mass
that the ranked blocks hold, by the exact attention of the form's own layers, for queries at equal
distances in the second half. Nothing is measured of a block size before the converted model, with
every block selected, has the losses of dense attention.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import functools
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from native_sparse_attention import collect

from . import common, pretrained
from .common import Row, WrongResult
from .pretrained import DENSE, percent
from .pretrained_model import Corpus, Network, corpora, load, own_texts, tiny

PAGE = common.RESULTS / "training.md"
# characters of a training text for each token, more than there are
CHARACTERS = 6
# tokens of the text of the check, at most
CHECK_LENGTH = 2048
# queries of a text of which the far mass is measured
WATCHED = 64


@dataclasses.dataclass(frozen=True)
class Plan:
    sizes: tuple[int, ...] = (32, 64)
    tokens: tuple[int, int, int] = pretrained.TOKENS
    T: int = 8192
    windows: int = 8  # texts of each kind
    needles: int = 8  # of each depth
    watched: int = 2  # texts whose far mass is measured
    train_T: int = 8192
    batch: int = 1
    steps: int = 200
    ranking_steps: int = 200
    lr: float = 3e-5
    ranking_lr: float = 1e-3
    queries: int = 64  # of a step, which rankings learn from
    seed: int = 0

    def __post_init__(self) -> None:
        for s in self.sizes:
            if s < 4 or any(tokens % s for tokens in self.tokens):
                raise ValueError(f"s must divide {self.tokens}, got {s}")
        keys = sum(self.tokens)
        least = dict(T=2 * keys, train_T=keys + 2 * max(self.sizes))
        least |= dict(windows=1, needles=0, watched=0, batch=1, steps=1, ranking_steps=1, queries=1)
        common.check_least(self, least)


# training


def training_rows(texts: Sequence[Corpus], coder: Network, plan: Plan) -> Tensor:
    """Rows [N, train_T] of the files that no evaluation reads, as many of each kind of text. Raises
    ValueError: there is none of a kind."""
    most = -(-plan.steps * plan.batch // len(texts))
    by_kind: list[Tensor] = []
    for corpus in texts:
        others = corpus.without(plan.T, plan.windows)
        text = others.text(0, CHARACTERS * plan.train_T * most) if others.files else ""
        tokens = torch.tensor(coder.encode(text), dtype=torch.long)
        rows = min(most, len(tokens) // plan.train_T)
        if rows < 1:
            raise ValueError(
                f"data must hold {plan.train_T} tokens of {corpus.name} beside those of the "
                f"evaluation, got {len(tokens)}"
            )
        by_kind.append(tokens[: rows * plan.train_T].view(rows, -1))
    fewest = min(len(rows) for rows in by_kind)
    return torch.cat([rows[:fewest] for rows in by_kind])


def autocast(device: torch.device) -> torch.autocast:
    """bf16 on a GPU. Casts of weights are not kept: a step changes the weights."""
    cuda = device.type == "cuda"
    return torch.autocast(device.type, torch.bfloat16, enabled=cuda, cache_enabled=False)


def tune(network: Any, rows: Tensor, plan: Plan) -> list[float]:
    """Train a model on next tokens. The losses of the steps."""
    learned, losses = list(network.parameters()), []
    generator = torch.Generator().manual_seed(plan.seed)
    optimizer = torch.optim.AdamW(learned, lr=plan.lr, weight_decay=0.0)
    for _ in range(plan.steps):
        drawn = rows[torch.randint(len(rows), (plan.batch,), generator=generator)]
        ids = drawn.to(network.device)
        with autocast(network.device):
            loss = network(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(learned, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.item())
    return losses


def distilled(network: Any, rows: Tensor, plan: Plan, stage: str) -> list[float]:
    """The losses of a stage: of the ranking, or of next tokens."""
    from native_sparse_attention.hf import distill

    alone = stage == "ranking"
    with autocast(network.device):
        history = distill(
            network, rows, stage=stage, batch_size=plan.batch, ranking_queries=plan.queries,
            steps=plan.ranking_steps if alone else plan.steps,
            lr=plan.ranking_lr if alone else plan.lr,
            generator=torch.Generator().manual_seed(plan.seed),
        )  # fmt: skip
    return [step["ranking" if alone else "loss"] for step in history]


def converted(network: Any, s: int, importance: str, plan: Plan, **settings: Any) -> Any:
    from native_sparse_attention.hf import convert

    names = ("num_initial_blocks", "num_local_blocks", "num_selected_blocks")
    blocks: dict[str, Any] = dict(zip(names, (t // s for t in plan.tokens), strict=True))
    blocks |= dict(selection_block_size=s, dense_length=0, importance=importance) | settings
    return convert(copy.deepcopy(network), **blocks).eval()


# measures


def check(model: Network, s: int, text: Tensor, plan: Plan) -> float:
    """Greatest mean difference of a token's loss from dense attention, in a converted model that
    selects every block, by `max` and by the index.

    text: [1 T]. The queries of the last block lack one, and are left out: were there none, the
    model would be dense without a selection. Raises WrongResult: more than rounding explains."""
    text = text[:, : max(CHECK_LENGTH, sum(plan.tokens) + 2 * s)]
    text = text[:, : text.shape[1] // s * s]
    n = text.shape[1] // s - 1 - sum(plan.tokens[:2]) // s
    of_dense, apart = model.losses(text)[:, :-s], 0.0
    for importance in ("max", "index"):
        whole = converted(model.network, s, importance, plan, num_selected_blocks=n)
        losses = Network(whole, model.encode).losses(text)[:, :-s]
        apart = max(apart, (losses - of_dense).abs().mean().item())
    if not apart <= pretrained.MOST_APART:
        raise WrongResult(f"with every block of {s}, a token's loss is {apart:.1e} off")
    return apart


@torch.no_grad()
def caught_row(model: Network, texts: Tensor) -> Row:
    """The far mass, and the share of it that the ranked blocks hold."""
    T = texts.shape[1]
    at = torch.linspace(T // 2, T - 1, min(WATCHED, T // 2)).long()
    far = held = total = 0.0
    for text in texts.split(1):
        with collect(model.network, queries=at) as readings:
            model.hidden(text)
        for reading in (one for of_layer in readings.values() for one in of_layer):
            ranked = torch.tensor([kind == "ranked" for kind in reading.kinds])
            mass: Any = reading.block_mass
            held += mass[..., ranked].sum().item()
            far += mass.shape[:3].numel() - mass[..., ~ranked].sum().item()
            total += mass.shape[:3].numel()
    return {"caught": round(held / far, 4), "far": round(far / total, 4)} if far > 0 else {}


def timed(train: Callable[[], list[float]]) -> Row:
    """What a training took, and the mean loss of its last tenth."""
    began, losses = time.perf_counter(), train()
    last = losses[-max(1, len(losses) // 10) :]
    seconds = round(time.perf_counter() - began, 1)
    return {"seconds": seconds, "last_losses": round(sum(last) / len(last), 5)}


class Run:
    """All forms of a model, one after another, and their rows."""

    def __init__(
        self, model: Network, texts: Sequence[Corpus], plan: Plan, recorder: common.Recorder
    ) -> None:
        self.model, self.plan, self.recorder = model, plan, recorder
        self.training = training_rows(texts, model, plan)
        self.texts = {c.name: c.windows(model, plan.T, plan.windows) for c in texts}
        names = ("T", "train_T", "batch", "steps", "ranking_steps", "lr", "ranking_lr")
        self.known = {name: getattr(plan, name) for name in names}
        self.known |= {"train_rows": len(self.training)}
        # the losses of "dense" and "dense, tuned", by text
        self.base: dict[str, dict[str, Tensor]] = {}

    def all(self) -> None:
        network, plan, rows = self.model.network, self.plan, self.training
        self.measure({"form": "dense"}, network)
        tuned = copy.deepcopy(network)
        trained = timed(functools.partial(tune, tuned, rows, plan))
        self.measure({"form": "dense, tuned", "seed": plan.seed, **trained}, tuned)
        del tuned
        for s in plan.sizes:
            known: Row = {"s": s, "seed": plan.seed}
            try:
                check(self.model, s, next(iter(self.texts.values()))[:1], plan)
            except WrongResult as error:
                self.add({"form": "index", "s": s, "failed": f"wrong: {error}"})
                continue
            index = converted(network, s, "index", plan)
            self.measure({"form": "index", **known}, index)
            for form, stage in (("index, ranking", "ranking"), ("index, all", "all")):
                trained = timed(functools.partial(distilled, index, rows, plan, stage))
                self.measure({"form": form, **known, **trained}, index)
            del index
            greatest = converted(network, s, "max", plan)
            trained = timed(functools.partial(tune, greatest, rows, plan))
            self.measure({"form": "max, tuned", **known, **trained}, greatest)

    def measure(self, row: Row, network: Any) -> None:
        """Add the rows of a model, one of each text."""
        model, plan = Network(network, self.model.encode), self.plan
        for name, texts in self.texts.items():
            losses = pretrained.losses(model, DENSE, texts)
            base = self.base.setdefault(name, {})
            if row["form"].startswith("dense"):
                base[row["form"]] = losses
            new: Row = {"text": name, **pretrained.loss_row(losses, base["dense"])}
            if "dense, tuned" in base:
                above = pretrained.loss_row(losses, base["dense, tuned"])
                fields = [field for field in above if field.startswith("above")]
                new |= {field.replace("above", "above_tuned"): above[field] for field in fields}
            new |= pretrained.needle_row(model, DENSE, texts, plan.needles)
            if "s" in row and plan.watched:
                new |= caught_row(model, texts[: plan.watched])
            self.add({**row, **new})
            common.release()

    def add(self, row: Row) -> None:
        if "s" in row:
            counts = (tokens // row["s"] for tokens in self.plan.tokens)
            row |= dict(zip(("initial", "local", "n"), counts, strict=True))
            row["keys"] = sum(self.plan.tokens)
        self.recorder.add({**row, **self.known})


# the table


def line(row: Row) -> str:
    seed = f", seed {row['seed']}" if "seconds" in row else ""
    return row["form"] + (f", blocks of {row['s']}" if "s" in row else "") + seed


def table(rows: Sequence[Row]) -> str:
    """Loss, above dense, above dense that was tuned; needles at each depth; far mass."""

    def cell(passes: dict[str, Row]) -> str:
        (row,) = passes.values()
        over = f"{row['loss']:.4f}", percent(row, "above"), percent(row, "above_tuned")
        found = " / ".join(map(str, row.get("found", ())))
        return "; ".join([*over, found, f"{row['caught']:.2f}" if "caught" in row else ""])

    head = "form (loss; above dense; above dense, tuned; needles; far mass caught)"
    measured = [row for row in rows if "text" in row]
    drawn = common.grid(measured, head, line, lambda row: (row["text"], row["T"]), cell)
    return "\n\n".join(filter(None, (drawn, common.failures(rows, line))))


TABLES = {PAGE: {"distillation": table}}


# the program


SETTINGS = [
    field.name for field in dataclasses.fields(Plan) if field.name not in ("sizes", "tokens")
]


def options(parser: argparse.ArgumentParser) -> None:
    plan = Plan()
    pretrained.add_texts(parser)
    parser.add_argument("--s", type=int, nargs="+", default=plan.sizes, help="block sizes")
    for name in SETTINGS:
        value, option = getattr(plan, name), f"--{name.replace('_', '-')}"
        parser.add_argument(option, type=type(value), default=value, dest=name)


def run(args: argparse.Namespace, recorder: common.Recorder) -> None:
    if args.quick:
        sizes: dict[str, Any] = dict(tokens=(16, 32, 32), T=256, train_T=128, windows=2, needles=1)
        plan = Plan((16,), **sizes, watched=1, steps=2, ranking_steps=2, queries=16)
    else:
        plan = Plan(tuple(args.s), **{name: getattr(args, name) for name in SETTINGS})
    model = tiny(args.device) if args.quick else load(args.model, args.device)
    model.network.set_attn_implementation("sdpa")
    Run(model, corpora(args.data or own_texts()), plan, recorder).all()


BENCHMARK = common.Benchmark("distillation", __doc__, options, run, ("form", "s", "text"), TABLES)
main = BENCHMARK.main

if __name__ == "__main__":
    main()
