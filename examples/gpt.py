"""A small GPT on the bytes of a text file. Every layer attends by SparseAttention.

python examples/gpt.py FILE        train on FILE, then continue a line of it
python examples/gpt.py --quick     a few steps on this file
"""

import argparse
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

from native_sparse_attention import KVCache, SparseAttention


class Block(nn.Module):
    def __init__(self, dim):
        super().__init__()
        compressed = dict(compress_block_size=16, compress_block_sliding_stride=8)
        selected = dict(selection_block_size=16, num_selected_blocks=4)
        self.attention = SparseAttention(
            dim,
            dim // 4,
            4,
            kv_heads=2,
            causal=True,
            sliding_window_size=64,
            **compressed,
            **selected,
        )  # normalises its input
        self.mlp = nn.Sequential(
            nn.RMSNorm(dim), nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim)
        )

    def forward(self, x, cache=None):
        x = x + self.attention(x, cache=cache)
        return x + self.mlp(x)


class GPT(nn.Module):
    def __init__(self, dim=128, depth=4):
        super().__init__()
        self.embed = nn.Embedding(256, dim)
        self.blocks = nn.ModuleList(Block(dim) for _ in range(depth))
        self.head = nn.Sequential(nn.RMSNorm(dim), nn.Linear(dim, 256, bias=False))

    def forward(self, ids, caches=None):  # [b, n] -> [b, n, 256]
        x = self.embed(ids)
        for block, cache in zip(self.blocks, caches or [None] * len(self.blocks), strict=True):
            x = block(x, cache)
        return self.head(x)

    @torch.no_grad()
    def sample(self, ids, count):
        """Continue ids [1, n] by `count` bytes: the prompt at once, then one token at a time."""
        caches = [KVCache(max_length=ids.shape[1] + count) for _ in self.blocks]
        new, found = ids, []
        for _ in range(count):
            new = self(new, caches)[:, -1].softmax(-1).multinomial(1)
            found.append(new.item())
        return bytes(found)


def count(text):
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a number of at least 1, got {text!r}")
    return int(text)


def main(argv=None):
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("file", nargs="?", default=__file__)
    parser.add_argument("--steps", type=count, default=500)
    parser.add_argument("--length", type=count, default=512, help="bytes of a sequence")
    parser.add_argument("--batch", type=count, default=8)
    parser.add_argument("--quick", action="store_true", help="a few steps of a tiny model")
    args = parser.parse_args(argv)
    if args.quick:
        args.steps, args.length, args.batch = 20, 128, 4

    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        data = Path(args.file).read_bytes()
    except OSError as error:
        parser.error(f"{args.file}: {error.strerror}")
    if len(data) <= args.length:
        parser.error(f"FILE must have more than --length {args.length} bytes, got {len(data)}")
    text = torch.frombuffer(bytearray(data), dtype=torch.uint8).long()
    model = (GPT(dim=32, depth=2) if args.quick else GPT()).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for step in range(1, args.steps + 1):
        starts = torch.randint(len(text) - args.length, (args.batch,)).tolist()
        ids = torch.stack([text[i : i + args.length + 1] for i in starts]).to(device)
        loss = F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % max(1, args.steps // 10) == 0:
            print(f"step {step}: {loss.item():.3f} nats a byte")
    prompt = text[None, :64].to(device)
    print(bytes(prompt[0].tolist()).decode(errors="replace"), end="")
    print(model.sample(prompt, 100).decode(errors="replace"))
    return loss.item()


if __name__ == "__main__":
    main()
