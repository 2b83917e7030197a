"""What a provider must get right before it is timed.

Every provider computes a gated sum of attentions, each a softmax over the keys that a mask lets a
query see. `definition` writes that down once, in eager PyTorch, one KV head at a time; a provider's
output and gradients may err, against fp64, at most `factor` times what `definition` itself errs in
the provider's dtype, plus one ulp of the largest value.

* At a small length, all outputs and all gradients.
* At the timed length, the outputs and the gradients of some queries, recomputed from the definition
  with the provider's own block indices; the ranking of those queries; and two laws that the
  gradients of all keys and values obey (`check_laws`).

i query, j key, r rows that are checked, g query heads of one KV head, c blocks
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional

from .common import WrongResult
from .problem import GROUP, Setting, Tensors

__all__ = ["Branch", "WrongResult"]

# laid out [1 T H ...]; all others [1 S K ...]
OF_QUERIES = ("q", "branch_gates", "d_out")


@dataclass(frozen=True)
class Branch:
    """One softmax attention of a provider's definition.

    seen:   i [r 1], j [j], block indices [r n] or None -> which keys [r j] a query sees.
    count:  i -> how many it sees; of the selected branch, where all slots are full.
    gate:   column of branch_gates that multiplies the output; None for 1.
    pool:   keys and values are the means of so many tokens.
    """

    keys: str
    values: str
    seen: Callable[[Tensor, Tensor, Tensor | None], Tensor]
    count: Callable[[Tensor], Tensor]
    gate: int | None = None
    pool: int = 1


# the branches there are


def window(w: int | None, keys: str = "k", values: str = "v", gate: int | None = None) -> Branch:
    """Keys `i - w .. i`; all of the past where w is None."""
    if w is None:
        return Branch(keys, values, lambda i, j, _: j <= i, lambda i: i + 1, gate)
    return Branch(
        keys, values, lambda i, j, _: (j <= i) & (i - j <= w), lambda i: (i + 1).clamp(max=w + 1),
        gate,
    )  # fmt: skip


def behind(d: int, gate: int | None = None) -> Branch:
    """Compressed keys whose last token lies strictly before the query."""
    return Branch("ck", "cv", lambda i, j, _: (j + 1) * d - 1 < i, lambda i: i // d, gate)


def chosen(s: int, n: int, initial: int = 0, local: int = 0, gate: int | None = None) -> Branch:
    """Tokens, up to the query, of the blocks in the indices, the initial and the local ones."""

    def seen(i: Tensor, j: Tensor, indices: Tensor | None) -> Tensor:
        if indices is None:
            raise ValueError("the selected branch needs block indices")
        blocks = torch.zeros(len(i), len(j) // s + 2, dtype=torch.bool, device=i.device)
        blocks.scatter_(1, torch.where(indices >= 0, indices, blocks.shape[1] - 1).long(), True)
        c = torch.arange(blocks.shape[1], device=i.device)
        blocks |= (c < initial) | ((c > i // s - local) & (c <= i // s))
        return blocks[:, j // s] & (j <= i)

    full = n + initial + max(local - 1, 0)

    return Branch("k", "v", seen, lambda i: i % s + 1 + s * (i // s).clamp(max=full), gate)


# the definition


def logits(q: Tensor, k: Tensor) -> Tensor:
    """q [r g d], k [j d] -> [r g j]"""
    sim = torch.einsum("rgd,jd->rgj", q, k)
    return sim.to(torch.promote_types(sim.dtype, torch.float32)) * q.shape[-1] ** -0.5


def attend(sim: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """Logits [r g j], v [j e], mask [r j] -> [r g e]; a row that sees nothing gives 0."""
    empty = ~mask.any(-1)[:, None, None]
    sim = sim.masked_fill(~mask[:, None], float("-inf")).masked_fill(empty, 0.0)
    probs = sim.softmax(-1).masked_fill(empty, 0.0)
    return torch.einsum("rgj,je->rge", probs.to(v.dtype), v)


def definition(branches: list[Branch], x: Tensors, i: Tensor, indices: Tensor | None) -> Tensor:
    """The output [r g e] of queries at positions i, one KV head: x has q [r g d], keys and values
    [j d]."""
    outs = []
    for branch in branches:
        keys, values = x[branch.keys], x[branch.values]
        if branch.pool > 1:
            keys, values = (t.unflatten(0, (-1, branch.pool)).mean(1) for t in (keys, values))
        j = torch.arange(len(keys), device=i.device)
        out = attend(logits(x["q"], keys), values, branch.seen(i[:, None], j, indices))
        if branch.gate is not None:
            out = out * x["branch_gates"][..., branch.gate, None]
        outs.append(out)
    return torch.stack(outs).sum(0) if len(outs) > 1 else outs[0]


def of_head(x: Tensors, h: int, rows: Tensor) -> Tensors:
    """One KV head's share: of_queries [r g ...], keys and values [j d]."""
    heads = next(t for name, t in x.items() if name not in OF_QUERIES).shape[2]
    share = {}
    for name, t in x.items():
        if name in OF_QUERIES:
            share[name] = t[0, rows].unflatten(1, (heads, -1))[:, h]
        else:
            share[name] = t[0, :, h]
    return share


def compute(
    branches: list[Branch],
    x: Tensors,
    names: tuple[str, ...],
    rows: Tensor,
    indices: Tensor | None,
    dtype: torch.dtype,
) -> Tensors:
    """By definition, in `dtype`: the rows' output "out" and the gradient "d..." of each of names,
    in the layout of x (but for the missing rows and the batch)."""
    parts: dict[str, list[Tensor]] = {name: [] for name in ("out", *(f"d{n}" for n in names))}
    heads = next(t for name, t in x.items() if name not in OF_QUERIES).shape[2]
    for h in range(heads):
        share = {name: t.detach().to(dtype) for name, t in of_head(x, h, rows).items()}
        leaves = [share[name].requires_grad_() for name in names]
        chosen_blocks = None if indices is None else indices[0, rows, h]
        out = definition(branches, share, rows, chosen_blocks)
        grads: tuple[Tensor, ...] = ()
        if leaves:
            grads = torch.autograd.grad(out, leaves, share["d_out"], materialize_grads=True)
        parts["out"].append(out.detach())
        for name, grad in zip(names, grads, strict=True):
            parts[f"d{name}"].append(grad)
    return {
        name: torch.cat(part, 1)
        if name == "out" or name[1:] in OF_QUERIES
        else torch.stack(part, 1)
        for name, part in parts.items()
    }


def joined(parts: list[Tensors]) -> Tensors:
    """What `compute` gave for some rows after another; of several, only gradients of queries."""
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


# checks


def check_values(actual: Tensors, x: Tensors, exact: Tensors, low: Tensors, factor: float) -> float:
    """The largest error as a share of its budget. Raises WrongResult: a value that is not finite,
    or an error above its budget."""
    worst = 0.0
    values = [t for name, t in x.items() if name in ("v", "cv")]
    terms = x["d_out"].double().norm(dim=-1).max() * max(
        t.double().norm(dim=-1).max() for t in values
    )
    for name, right in exact.items():
        value = actual[name].double()
        if not value.isfinite().all():
            raise WrongResult(f"{name} is not finite")
        error = (value - right).abs().max()
        lowp = (low[name].double() - right).abs().max()
        # a gradient is a difference of larger terms, formed in float32
        rounding = 0.0 if name == "out" else terms * torch.finfo(torch.float32).eps
        ulp = torch.finfo(actual[name].dtype).eps * right.abs().max() + rounding
        budget = factor * lowp + ulp
        if error > budget:
            raise WrongResult(
                f"{name} errs by {error:.2e}, above {factor} x {lowp:.2e} + {ulp:.2e}"
            )
        worst = max(worst, (error / budget).item())
    return worst


def share_of_budget(name: str, got: Tensor, exact: Tensor, low: Tensor) -> float:
    """The error (root mean square) as a share of its budget: twice that of eager PyTorch in the
    same dtype, and one unit in the last place. Raises WrongResult: an error above its budget."""
    error, lowp = ((t.double() - exact).norm().item() for t in (got, low))
    # gradients of weights are sums over all tokens, formed in fp32
    budget = 2 * lowp + torch.finfo(got.dtype).eps * exact.norm().item()
    if not error <= budget:
        raise WrongResult(f"{name} errs by {error:.2e}, above {budget:.2e}")
    return error / budget if budget else 0.0


def squares(t: Tensor) -> Tensor:
    """The sum of squares."""
    return t.float().square().sum(dtype=torch.float64)


def check_laws(branches: list[Branch], x: Tensors, grads: Tensors) -> None:
    """Two laws of all gradients together, for each KV head, whatever the keys seen.

    A query's probabilities sum to 1, so its d_out arrives whole at the values that it sees:
    `sum_j dv_j = sum_i gate_i d_out_i`, over the rows that see any. And logits are bilinear:
    `sum_i q_i . dq_i = sum_j k_j . dk_j`. Roundings are taken as independent. Raises WrongResult.
    """
    eps = 4 * torch.finfo(x["q"].dtype).eps
    every = torch.arange(x["q"].shape[1], device=x["q"].device)
    keys = sorted({b.keys for b in branches})
    for h in range(x[keys[0]].shape[2]):
        share = of_head(x, h, every)
        grad = of_head({name[1:]: t for name, t in grads.items()}, h, every)
        for name in {b.values for b in branches}:
            got = grad[name].sum(0, dtype=torch.float64)
            size, expected = squares(grad[name]), torch.zeros_like(got)
            for branch in branches:
                if branch.values != name:
                    continue
                arrives = share["d_out"].float() * (branch.count(every) > 0)[:, None, None]
                if branch.gate is not None:
                    arrives *= share["branch_gates"][..., branch.gate, None]
                expected += arrives.sum((0, 1), dtype=torch.float64)
                size += squares(arrives)
            if not (got - expected).norm() <= eps * size.sqrt():
                raise WrongResult(f"d{name}: its sum over all keys is not what d_out sends there")
        balance, size = torch.zeros_like(size), torch.zeros_like(size)
        for name in ("q", *keys):
            products = (share[name].float() * grad[name].float()).sum(-1)
            norms = share[name].float().norm(dim=-1) * grad[name].float().norm(dim=-1)
            size += squares(norms)
            balance += (1 if name == "q" else -1) * products.sum(dtype=torch.float64)
        if not balance.abs() <= eps * size.sqrt():
            raise WrongResult(f"sum of q dq and of {', '.join(keys)} times their gradients differ")


def block_weights(setting: Setting, importance: str, num_windows: int, like: Tensor) -> Tensor:
    """[w c]: what window w adds to the score of block c."""
    c = setting
    w = torch.arange(num_windows, device=like.device)[:, None]
    start = torch.arange(max(1, num_windows * c.d // c.s), device=like.device) * c.s
    if importance == "logits":
        return ((w * c.d // c.s * c.s) == start).to(like) * c.d / c.s
    shared = torch.minimum((w + 1) * c.d, start + c.s) - torch.maximum((w + 1) * c.d - c.l, start)
    return shared.clamp(min=0).to(like) / c.d


def integers(x: Tensor) -> tuple[Tensor, Tensor]:
    """The 8-bit integers of x [n m d], in fp32, and what one of them is worth for each of n."""
    mantissa, exponent = (127 / x.abs().amax((1, 2), keepdim=True)).frexp()
    factor = torch.ldexp((mantissa * 2**12).floor(), exponent - 12)
    return (x * factor).round().nan_to_num(), factor.reciprocal()[:, 0, 0]


def block_scores(setting: Setting, importance: str, q: Tensor, ck: Tensor, i: Tensor) -> Tensor:
    """Importance [r c] of every block for queries q [r g d] at positions i; d divides s."""
    if importance in ("max", "head_max"):
        blocks = max(1, len(ck) * setting.d // setting.s)
        whole = ck[: blocks * setting.s // setting.d].unflatten(0, (blocks, -1))
        asks, size = q.mean(1, keepdim=True) if importance == "max" else q, q.new_ones(())
        if setting.bits == 8:
            asks, (whole, size) = integers(asks.float())[0], integers(whole.float())
        found = []
        for ask in asks.unbind(1):
            sim = torch.einsum("rd,cwd->rcw", ask, whole)
            found.append(sim.to(torch.promote_types(sim.dtype, torch.float32)).amax(-1))
        return torch.stack(found).amax(0) * size * setting.D**-0.5
    sim = torch.einsum("rgd,wd->rgw", q, ck)
    sim = sim.to(torch.promote_types(sim.dtype, torch.float32)) * setting.D**-0.5
    if importance == "logits":
        sim = sim.mean(1)
    else:
        unseen = torch.arange(len(ck), device=i.device) >= (i // setting.d)[:, None, None]
        sim = sim.masked_fill(unseen, -1e30).softmax(-1).sum(1)
    return sim @ block_weights(setting, importance, len(ck), sim)


def blocks_of_groups(
    setting: Setting, importance: str, share: Tensors, i: Tensor
) -> tuple[Tensor, Tensor]:
    """Which blocks [r c] a first stage may keep, for queries at positions i, and which it must:
    those of the best groups, but for near ties. The last blocks, of no whole group, are none."""
    c = setting.of_groups
    exact = block_scores(c, importance, share["q"].double(), share["ck"].double(), i)
    low = block_scores(c, importance, share["q"], share["ck"], i).double()
    group = torch.arange(exact.shape[1], device=i.device)
    candidate = (group >= c.initial) & (group <= (i // c.s - c.local)[:, None])
    slack = 4 * (low - exact).abs().max() + 1e-5 * exact.abs().max()
    masked = exact.masked_fill(~candidate, float("-inf"))
    last = masked.topk(min(c.n, masked.shape[1]), dim=1).values[:, -1:]
    next_one = masked.topk(min(c.n + 1, masked.shape[1]), dim=1).values[:, -1:]
    is_few = candidate.sum(1, keepdim=True) <= c.n
    may, must = (masked >= last - slack), is_few | (masked > next_one + slack)
    missing = len(share["k"]) // setting.s - GROUP * len(group)
    may, must = (
        functional.pad((t & candidate).repeat_interleave(GROUP, 1), (0, missing))
        for t in (may, must)
    )
    return may, must


def check_ranking(
    setting: Setting, importance: str, x: Tensors, indices: Tensor, rows: Tensor
) -> None:
    """The chosen blocks are candidates, distinct, as many as there can be, and none that was left
    out scores higher by more than twice the budget of a score. Raises WrongResult: a selection that
    breaks one of these."""
    i, rule = rows - rows % setting.stride, importance
    for h in range(setting.K):
        c, importance = setting, rule
        asks = x.get("cq", x["q"])
        share = of_head({"q": asks.detach(), "ck": x["ck"].detach()}, h, i)
        if c.groups:
            share["k"] = of_head({"k": x["k"].detach()}, h, i)["k"]
            leader = rows - rows % (GROUP * c.s)
            leaders = of_head({"q": asks.detach(), "ck": x["ck"].detach()}, h, leader)
            may, must = blocks_of_groups(c, importance, share | leaders, i)
            c, importance, share["ck"] = replace(setting, l=1, d=1), "max", share["k"]
        exact = block_scores(c, importance, share["q"].double(), share["ck"].double(), i)
        low = block_scores(c, importance, share["q"], share["ck"], i).double()
        block = torch.arange(exact.shape[1], device=i.device)
        candidate = (block >= c.initial) & (block <= (i // c.s - max(c.local, 1))[:, None])
        required = candidate
        if c.groups:
            candidate, required = candidate & may, candidate & must
        slots = indices[0, rows, h].long()
        picks = torch.zeros(len(i), exact.shape[1] + 1, dtype=torch.int64, device=i.device)
        inside = torch.where((slots >= 0) & (slots <= exact.shape[1]), slots, exact.shape[1])
        picks.scatter_add_(1, inside, (slots >= 0).long())
        if (picks[:, :-1] > candidate).any() or picks[:, -1].any():
            raise WrongResult("a selected block is forced, not in the past, or selected twice")
        count, most = (t.sum(1).clamp(max=c.n) for t in (required, candidate))
        if ((picks.sum(1) < count) | (picks.sum(1) > most)).any():
            raise WrongResult("fewer blocks are selected than could be")
        chosen_blocks = picks[:, :-1] > 0
        worst_in = exact.masked_fill(~chosen_blocks, float("inf")).amin(1)
        best_out = exact.masked_fill(chosen_blocks | ~required, float("-inf")).amax(1)
        sizes = (t.masked_fill(~candidate, 0.0).abs().max() for t in (low - exact, exact))
        slack = 4 * next(sizes) + 1e-5 * next(sizes)
        if (best_out > worst_in + slack).any():
            raise WrongResult(f"a block with a higher score, by over {slack:.1e}, is left out")
