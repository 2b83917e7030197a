"""What the ranking finds: one key like the query, hidden among random keys.

    python examples/needle.py
    python examples/needle.py --quick

Nothing is trained. Keys are random, with variance 1 in each feature. One of them, the needle, also
holds `strength` times the direction of the last query. A needle is found if the last query selects
its block. The columns are settings of the layer that rank blocks differently:

* mean of 32: compressed keys are means of 32 tokens, and a block scores their mean logit, in effect
  a mean over its 64 tokens. A mean of m tokens keeps 1/m of the needle and 1/sqrt(m) of the noise,
  so a weak needle drowns.
* softmax of 32: the same compressed keys, scored by softmax mass as in the paper.
* max of tokens: every key has a logit, and a block scores its largest one.

A trained network of compression can learn to keep what is looked for; a mean cannot. This shows
what the rules can find before anything has learned.
"""

import argparse

import torch

from native_sparse_attention import select_blocks

HEADS, KV_HEADS, D = 8, 2, 64
BLOCK, SELECTED = 64, 8  # tokens of a block, blocks of a query
RULES = {
    "mean of 32": dict(l=32, d=16, importance="logits"),
    "softmax of 32": dict(l=32, d=16, importance="probs"),
    "max of tokens": dict(l=1, d=1, importance="max"),
}


def haystack(length, strength, batch, device):
    """Queries [b, 1, h, d] of the last token, keys [b, n, k, d], and the needles' positions [b]."""
    k = torch.randn(batch, length, KV_HEADS, D, device=device)
    q = torch.randn(batch, 1, KV_HEADS, D, device=device)
    at = torch.randint(length - BLOCK, (batch,), device=device)  # before the query's own block
    k[torch.arange(batch), at] += strength * torch.nn.functional.normalize(q[:, 0], dim=-1)
    return q.repeat_interleave(HEADS // KV_HEADS, dim=2), k, at


def means(k, l, d):
    """Compressed keys [b, n / d, k, d]: means of the l tokens that end at each multiple of d."""
    before = k.new_zeros(len(k), l - d, *k.shape[2:])  # tokens before 0 are zeros
    padded = torch.cat([before, k], dim=1)
    return padded.unfold(1, l, d).mean(dim=-1)


def found(length, strength, rule, batch, device):
    """The share of needles whose block is selected."""
    q, k, at = haystack(length, strength, batch, device)
    chosen = select_blocks(
        q,
        means(k, rule["l"], rule["d"]),
        compress_block_size=rule["l"],
        compress_block_sliding_stride=rule["d"],
        selection_block_size=BLOCK,
        num_selected_blocks=SELECTED,
        importance=rule["importance"],
        seq_len=length,
    )  # [b, 1, k, n]
    hits = (chosen == at[:, None, None, None] // BLOCK).any(dim=-1)
    return hits.float().mean().item()


def main(argv=None):
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--lengths", type=int, nargs="+", default=[2048, 8192, 32768])
    parser.add_argument("--batch", type=int, default=16, help="haystacks for a number")
    parser.add_argument("--quick", action="store_true")
    args = parser.parse_args(argv)
    if args.quick:
        args.lengths, args.batch = [2048], 8

    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    rates = {}
    print("tokens  strength  " + "  ".join(RULES) + "  by chance")
    for length in args.lengths:
        for strength in (0, 8, 16, 32):
            row = {
                name: found(length, strength, rule, args.batch, device)
                for name, rule in RULES.items()
            }
            shown = "  ".join(f"{rate:{len(name)}.2f}" for name, rate in row.items())
            chance = SELECTED / (length // BLOCK - 1)
            print(f"{length:6}  {strength:8}  {shown}  {chance:9.2f}")
            rates[length, strength] = row
    return rates


if __name__ == "__main__":
    main()
