"""Rules that choose the blocks of keys for each query, and how much attention mass they catch.

    B batch    T queries    S keys    H query heads    K KV heads    G = H / K    D head width

All tensors have layout [B, T, H, D]; queries and keys are rotated. A query attends, in one softmax,
to the first blocks, the last blocks up to its own (both forced), and n blocks of those between.
**Far mass** is the share of full attention on the blocks between.
"""

from __future__ import annotations

import dataclasses

import torch
import torch.nn.functional as F
from torch import Tensor

import native_sparse_attention as nsa
from native_sparse_attention import blocks

from .common import Row

RANKED = ("logits", "probs", "max")
# rules of this file, of exact logits or of what bounds them
EXACT = ("oracle", "heads", "bounds")
NAMES = ("dense", "all", "window", *EXACT, *RANKED)
# scores of queries and keys that exist at one time, in numbers
MOST_SCORES = {"cpu": 2**25, "cuda": 2**28}


@dataclasses.dataclass(frozen=True)
class Rule:
    """How a query chooses its blocks. `dense` has none of the sizes; `all` selects every block, by
    its own route; `window` ranks none; `oracle` takes the blocks of most attention mass, `heads`
    those whose greatest logits, one of each head, have the greatest mean, and `bounds` those whose
    logits may be greatest by the least and the greatest value of each channel of their keys."""

    name: str
    s: int = 0
    initial: int = 0
    local: int = 0
    n: int = 0
    l: int = 0
    d: int = 0
    per_head: bool = False

    def __post_init__(self) -> None:
        if self.name not in NAMES:
            raise ValueError(f"name must be one of {', '.join(NAMES)}, got {self.name!r}")
        if self.name != "dense" and (self.s < 1 or self.local < 1):
            raise ValueError(f"s and local must be at least 1, got s={self.s}, local={self.local}")
        if self.name in RANKED and not 1 <= self.d <= self.l:
            raise ValueError(f"d must be 1 to l={self.l}, got {self.d}")

    @property
    def keys(self) -> int | None:
        """Keys that a query reads at most; None for all."""
        if self.name in ("dense", "all"):
            return None
        return (self.initial + self.local + self.n) * self.s

    def row(self) -> Row:
        fields = dataclasses.asdict(self)
        return {"rule": fields.pop("name"), **fields, "keys": self.keys}

    def whole(self, S: int) -> Rule:
        """The rule `all` with these blocks, of S keys."""
        n = max(1, blocks.num_blocks(S, self.s) - self.initial - self.local)
        return Rule("all", self.s, self.initial, self.local, n, self.s, self.s)


DENSE = Rule("dense")


def pooled(k: Tensor, l: int, d: int) -> Tensor:
    """Means of the windows of l keys that end every d tokens, zeros before the first: [B W K D]."""
    if l == d == 1:
        return k
    k = F.pad(k[:, : k.shape[1] // d * d], (0, 0, 0, 0, l - d, 0))
    return k.unfold(1, l, d).mean(dim=-1)


def candidates(rule: Rule, T: int, S: int, offset: int, device: torch.device) -> Tensor:
    """Which blocks lie between the initial and the local ones of queries from `offset` on: [T C]"""
    own = torch.arange(offset, offset + T, device=device) // rule.s
    block = torch.arange(blocks.num_blocks(S, rule.s), device=device)
    return (block >= rule.initial) & (block <= own[:, None] - rule.local)


def exact_logits(q: Tensor, k: Tensor, offset: int) -> Tensor:
    """Logits of full causal attention, [B H T S], in float32."""
    B, T, H, D = q.shape
    grouped = q.float().unflatten(2, (k.shape[2], -1))
    logits = torch.einsum("btkgd,bskd->bkgts", grouped, k.float()) * D**-0.5
    hidden = torch.ones(T, k.shape[1], dtype=torch.bool, device=q.device).triu(offset + 1)
    return logits.masked_fill_(hidden, -torch.inf).view(B, H, T, -1)


def attention_mass(q: Tensor, k: Tensor, offset: int) -> Tensor:
    """Probabilities of full causal attention, [B H T S], in float32."""
    return exact_logits(q, k, offset).softmax(dim=-1)


def exact_scores(rule: Rule, q: Tensor, k: Tensor, offset: int) -> Tensor:
    """What the rule adds up over the heads of a group: [B H T C]."""
    if rule.name == "oracle":
        return by_block(attention_mass(q, k, offset), rule.s)
    over = -k.shape[1] % rule.s
    if rule.name == "heads":
        logits = F.pad(exact_logits(q, k, offset), (0, over), value=-torch.inf)
        return logits.unflatten(-1, (-1, rule.s)).amax(dim=-1)
    by_blocks = F.pad(k.float(), (0, 0, 0, 0, 0, over)).unflatten(1, (-1, rule.s))
    q = q.float().unflatten(2, (k.shape[2], -1))
    form = "btkgd,bckd->bkgtc"
    found = torch.einsum(form, q.clamp(min=0), by_blocks.amax(dim=2))
    found += torch.einsum(form, q.clamp(max=0), by_blocks.amin(dim=2))
    return found.flatten(1, 2)


def by_block(mass: Tensor, s: int) -> Tensor:
    """Mass of each block of s keys: [B H T S] to [B H T C]."""
    return F.pad(mass, (0, -mass.shape[-1] % s)).unflatten(-1, (-1, s)).sum(dim=-1)


def largest(rule: Rule, scores: Tensor, between: Tensor, kv_heads: int) -> Tensor:
    """The n blocks of most score [B H T C] of each KV group (or head): indices [B T K|H n]."""
    if not rule.per_head:
        scores = scores.unflatten(1, (kv_heads, -1)).sum(dim=2)
    n = min(rule.n, scores.shape[-1])
    top, indices = scores.masked_fill(~between, -torch.inf).topk(n, dim=-1)
    indices = indices.masked_fill(top == -torch.inf, -1)
    return F.pad(indices, (0, rule.n - n), value=-1).transpose(1, 2).int().contiguous()


def by_exact(rule: Rule, q: Tensor, k: Tensor, offset: int) -> Tensor:
    """`largest` of `exact_scores`, some queries at a time."""
    B, T, H, _ = q.shape
    S = k.shape[1]
    step = max(1, MOST_SCORES.get(q.device.type, 2**25) // (B * H * S))
    found = []
    for part in range(0, T, step):
        some, at = q[:, part : part + step], offset + part
        between = candidates(rule, some.shape[1], S, at, q.device)
        found.append(largest(rule, exact_scores(rule, some, k, at), between, k.shape[2]))
    return torch.cat(found, dim=1)


def settings(rule: Rule) -> Row:
    """The arguments of the package's functions."""
    # `all` ranks by what costs least; every block is selected whatever its score
    return dict(
        compress_block_size=rule.l,
        compress_block_sliding_stride=rule.d,
        selection_block_size=rule.s,
        num_selected_blocks=rule.n,
        num_initial_blocks=rule.initial,
        num_local_blocks=rule.local,
        importance=rule.name if rule.name in RANKED else "logits",
        query_heads_share_selected_kv=not rule.per_head,
    )


def choose(rule: Rule, q: Tensor, k: Tensor, offset: int = 0) -> Tensor:
    """Block indices [B T K|H n] of the queries from position `offset` on."""
    if rule.name in EXACT:
        return by_exact(rule, q, k, offset)
    ck = pooled(k, rule.l, rule.d)
    return nsa.select_blocks(q, ck, q_offset=offset, seq_len=k.shape[1], **settings(rule))


def attend(rule: Rule, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention [B T H D] of all tokens of a sequence under a rule other than `dense`."""
    forced = dict(num_initial_blocks=rule.initial, num_local_blocks=rule.local)
    if rule.name in RANKED:
        ck = pooled(k, rule.l, rule.d)
        return nsa.native_sparse_attention(
            q, k, v, ck, branches=("selected",), sliding_window_size=0, **settings(rule)
        )
    if rule.name == "window":
        B, T = q.shape[:2]
        indices = q.new_empty((B, T, k.shape[2], 0), dtype=torch.int32)
    else:
        indices = choose(rule, q, k)
    return nsa.selected_attention(q, k, v, indices, selection_block_size=rule.s, **forced)


def seen(rule: Rule, indices: Tensor, S: int) -> Tensor:
    """Which keys each query reads, by block indices [B T K|H n] of all tokens: [B K|H T S]."""
    B, T, R, _ = indices.shape
    between = candidates(rule, T, S, 0, indices.device)
    count = between.shape[-1]
    # -1 is one block more, which is no block
    chosen = torch.zeros(B, R, T, count + 1, dtype=torch.bool, device=indices.device)
    chosen.scatter_(-1, (indices.transpose(1, 2) % (count + 1)).long(), True)
    by_key = (chosen[..., :count] | ~between).repeat_interleave(rule.s, dim=-1)[..., :S]
    return by_key.tril_()


def attend_masked(rule: Rule, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """`attend` in torch's SDPA under a mask, which on a CPU takes less time."""
    B, T, H, _ = q.shape
    if rule.name == "window":
        indices = torch.full((B, T, k.shape[2], 1), -1, device=q.device)
    else:
        indices = choose(rule, q, k)
    mask = seen(rule, indices, k.shape[1])
    q, k, v = (t.transpose(1, 2).repeat_interleave(H // t.shape[2], dim=1) for t in (q, k, v))
    mask = mask.repeat_interleave(H // mask.shape[1], dim=1)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2)


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
