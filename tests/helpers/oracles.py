"""The operations once more, from their definitions: one query and one head at a time, in Python
sets.

Slow and small, sharing nothing with the library; it says which keys a query sees and with what
weight, and the softmax is the textbook's.
"""

import itertools

import torch
import torch.nn.functional as F


def softmax_attention(q, keys, values, factor=None, scale=None, soft_cap=None, sink=None):
    """q [D], keys [N, D], values [N, E] -> (out [E], lse); 0 and -inf for no keys."""
    logits = keys @ q * (q.shape[-1] ** -0.5 if scale is None else scale)
    if soft_cap is not None:
        logits = soft_cap * torch.tanh(logits / soft_cap)
    if factor is not None:
        logits = logits * factor
    if sink is not None:
        logits = torch.cat((logits, sink[None]))
        values = torch.cat((values, values.new_zeros(1, values.shape[-1])))
    if len(logits) == 0:
        return values.new_zeros(values.shape[-1]), q.new_full((), float("-inf"))
    return logits.softmax(0) @ values, logits.logsumexp(0)


def per_query(q, kv_heads, sinks, keys_of, **softmax):
    """Attention of each query to the keys, values and factors `keys_of(b, position t, head h, KV
    head)`, laid out as [B, T, H, ...]."""
    B, T, H, _ = q.shape
    outs, lses = [], []
    for b, t, h in itertools.product(range(B), range(T), range(H)):
        sink = None if sinks is None else sinks[h]
        keys = keys_of(b, t, h, h // (H // kv_heads))
        out, lse = softmax_attention(q[b, t, h], *keys, **softmax, sink=sink)
        outs.append(out)
        lses.append(lse)
    return torch.stack(outs).view(B, T, H, -1), torch.stack(lses).view(B, T, H)


def visible_windows(i, W, d, causal):
    return [w for w in range(W) if not causal or (w + 1) * d - 1 < i]


def compressed(
    q, ck, cv, mem_k=None, mem_v=None, sinks=None, *, compress_block_sliding_stride, seq_len,
    causal, **softmax,
):  # fmt: skip
    offset, W = seq_len - q.shape[1], ck.shape[1]

    def keys_of(b, t, h, k):
        w = visible_windows(offset + t, W, compress_block_sliding_stride, causal)
        keys, values = ck[b, w, k], cv[b, w, k]
        if mem_k is not None:
            keys, values = torch.cat((mem_k[k], keys)), torch.cat((mem_v[k], values))
        return keys, values

    return per_query(q, ck.shape[2], sinks, keys_of, **softmax)


def window(q, k, v, sinks=None, *, sliding_window_size, causal, **softmax):
    offset, w = k.shape[1] - q.shape[1], sliding_window_size

    def keys_of(b, t, h, kv):
        i = offset + t
        last = i if causal else i + w
        j = [j for j in range(k.shape[1]) if i - w <= j <= last]
        return k[b, j, kv], v[b, j, kv]

    return per_query(q, k.shape[2], sinks, keys_of, **softmax)


def forced_blocks(i, num_blocks, s, causal, initial, local):
    forced = set(range(min(initial, num_blocks)))
    if causal:
        own = i // s
        forced = {c for c in forced if c <= own}
        forced |= {c for c in range(own - local + 1, own + 1) if c >= 0}
    return forced


def selected(
    q, k, v, gates=None, sinks=None, *, block_indices, selection_block_size, causal,
    num_initial_blocks=0, num_local_blocks=1, **softmax,
):  # fmt: skip
    S, s, offset = k.shape[1], selection_block_size, k.shape[1] - q.shape[1]

    def keys_of(b, t, h, kv):
        i = offset + t
        r = h // (q.shape[2] // block_indices.shape[2])
        chosen = {c: slot for slot, c in enumerate(block_indices[b, t, r].tolist()) if c >= 0}
        forced = forced_blocks(i, -(-S // s), s, causal, num_initial_blocks, num_local_blocks)
        attended = set(chosen) | forced
        j = [j for j in range(S) if j // s in attended and (not causal or j <= i)]
        factor = None
        if gates is not None and j:
            gated = set(chosen) - forced
            one = gates.new_ones(())
            factor = torch.stack(
                [gates[b, t, r, chosen[x // s]] if x // s in gated else one for x in j]
            )
        return k[b, j, kv], v[b, j, kv], factor

    return per_query(q, k.shape[2], sinks, keys_of, **softmax)


ORACLES = {"compressed": compressed, "selected": selected, "window": window}


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
                per_head.append(of_windows.mean() if rule == "logits" else of_windows)
        total = torch.stack(per_head)
        if rule == "head_max":
            scores[c] = total.max()
            continue
        total = total.sum(0)
        scores[c] = total if rule == "probs" else total.max() / len(heads)
    return scores
