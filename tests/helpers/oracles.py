"""The operations once more, from their definitions: one query and one head at a time, in Python
sets.

Slow and small, sharing nothing with the library; it says which keys a query sees and with what
weight, and the softmax is the textbook's.
"""

import torch
import torch.nn.functional as F


def softmax_attention(q, keys, values, logit_factor=None, scale=None):
    """q [D], keys [N, D], values [N, E] -> (out [E], lse); 0 and -inf for no keys."""
    if len(keys) == 0:
        return values.new_zeros(values.shape[-1]), q.new_full((), float("-inf"))
    logits = keys @ q * (q.shape[-1] ** -0.5 if scale is None else scale)
    if logit_factor is not None:
        logits = logits * logit_factor
    return logits.softmax(0) @ values, logits.logsumexp(0)


def per_query(q, kv_heads, fn):
    """Call fn(b, position t, head h, kv head) for each and lay the (out, lse) out as [B, T, H,
    ...]."""
    B, T, H, _ = q.shape
    outs, lses = [], []
    for b in range(B):
        for t in range(T):
            for h in range(H):
                out, lse = fn(b, t, h, h // (H // kv_heads))
                outs.append(out)
                lses.append(lse)
    return torch.stack(outs).view(B, T, H, -1), torch.stack(lses).view(B, T, H)


def visible_windows(i, W, d, causal):
    return [w for w in range(W) if not causal or (w + 1) * d - 1 < i]


def compressed(q, ck, cv, mem_k, mem_v, d, causal, offset, scale=None):
    def one(b, t, h, k):
        w = visible_windows(offset + t, ck.shape[1], d, causal)
        keys, values = ck[b, w, k], cv[b, w, k]
        if mem_k is not None:
            keys, values = torch.cat((mem_k[k], keys)), torch.cat((mem_v[k], values))
        return softmax_attention(q[b, t, h], keys, values, scale=scale)

    return per_query(q, ck.shape[2], one)


def window(q, k, v, w, causal, offset, scale=None):
    def one(b, t, h, kv):
        i = offset + t
        last = i if causal else i + w
        j = [j for j in range(k.shape[1]) if i - w <= j <= last]
        return softmax_attention(q[b, t, h], k[b, j, kv], v[b, j, kv], scale=scale)

    return per_query(q, k.shape[2], one)


def forced_blocks(i, num_blocks, s, causal, initial, local):
    forced = set(range(min(initial, num_blocks)))
    if causal:
        own = i // s
        forced = {c for c in forced if c <= own}
        forced |= {c for c in range(own - local + 1, own + 1) if c >= 0}
    return forced


def selected(q, k, v, indices, s, causal, offset, initial=0, local=1, gates=None, scale=None):
    S = k.shape[1]

    def one(b, t, h, kv):
        i = offset + t
        r = h // (q.shape[2] // indices.shape[2])
        chosen = {c: slot for slot, c in enumerate(indices[b, t, r].tolist()) if c >= 0}
        forced = forced_blocks(i, -(-S // s), s, causal, initial, local)
        attended = set(chosen) | forced
        j = [j for j in range(S) if j // s in attended and (not causal or j <= i)]
        factor = None
        if gates is not None:
            one = gates.new_ones(())
            gated = set(chosen) - forced
            factor = [gates[b, t, r, chosen[x // s]] if x // s in gated else one for x in j]
            factor = torch.stack(factor) if factor else None
        return softmax_attention(q[b, t, h], k[b, j, kv], v[b, j, kv], factor, scale)

    return per_query(q, k.shape[2], one)


def block_scores(q, ck, mem_k, *, i, b, heads, kv, l, d, s, S, rule, interpolated, causal):
    """Score of every candidate block for one query position and the heads that rank together."""
    W = ck.shape[1]
    visible = visible_windows(i, W, d, causal)
    scale = q.shape[-1] ** -0.5
    if causal:
        complete = [c for c in range(S) if (c + 1) * s <= i // s * s]
    else:
        complete = list(range(-(-S // s)))
    scores = {}
    for c in complete:
        block = set(range(c * s, (c + 1) * s))
        mine = [w for w in range(W) if block & set(range(w * d, (w + 1) * d))]
        whole = [w for w in range(S + 1) if block & set(range(w * d, (w + 1) * d))]
        if causal and not set(whole) <= set(visible):
            continue
        per_head = []
        for h in heads:
            logits = ck[b, visible, kv] @ q[h] * scale
            if rule == "probs":
                memory = mem_k[kv] @ q[h] * scale if mem_k is not None else logits[:0]
                p = torch.cat((memory, logits)).softmax(0)[len(memory) :]
                if d > s:
                    per_head.append(p[visible.index(mine[0])])
                else:
                    share = [
                        len(block & set(range((w + 1) * d - l, (w + 1) * d))) / d for w in visible
                    ]
                    per_head.append((p * p.new_tensor(share)).sum())
            elif interpolated:
                tokens = F.interpolate(
                    logits[None, None], size=len(visible) * d, mode="linear", align_corners=False
                )[0, 0]
                per_head.append(tokens[c * s : (c + 1) * s].mean())
            else:
                of_windows = torch.stack([logits[visible.index(w)] for w in mine])
                per_head.append(of_windows if rule == "max" else of_windows.mean())
        total = torch.stack(per_head).sum(0)
        scores[c] = total if rule == "probs" else total.max() / len(heads)
    return scores
