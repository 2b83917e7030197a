"""A small GPT on the bytes of a text file: python examples/gpt.py [FILE] [--quick]"""

import argparse
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

from native_sparse_attention import KVCache, NSAConfig, SparseAttention


class Block(nn.Module):
    def __init__(self, dim):
        super().__init__()
        shape = dict(dim=dim, dim_head=dim // 4, heads=4, kv_heads=2, causal=True)
        sizes = dict(selection_block_size=16, num_local_blocks=4, num_selected_blocks=4)
        sizes |= dict(dense_length=0)  # sparse from the first token on
        config = NSAConfig.preset("one-softmax", **shape, **sizes)
        self.attention = SparseAttention.from_config(config)  # normalises its input
        inner = nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim)
        self.mlp = nn.Sequential(nn.RMSNorm(dim), *inner)

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
    def sample(self, ids, count):  # [1, n]: the prompt at once, then one token at a time
        caches = [KVCache(max_length=ids.shape[1] + count) for _ in self.blocks]
        new, found = ids, []
        for _ in range(count):
            new = self(new, caches)[:, -1].softmax(-1).multinomial(1)
            found.append(new.item())
        return bytes(found)


def main(argv=None):
    parser = argparse.ArgumentParser(description="train on a file, then continue its beginning")
    parser.add_argument("file", nargs="?", default=__file__, help="more than 512 bytes")
    parser.add_argument("--quick", action="store_true", help="a few steps of a tiny model")
    args = parser.parse_args(argv)
    torch.manual_seed(0)
    try:
        text = torch.tensor(list(Path(args.file).read_bytes()))
    except OSError as error:
        parser.error(f"{args.file}: {error.strerror}")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    steps, length, model = (20, 128, GPT(32, 2)) if args.quick else (500, 512, GPT())
    if len(text) <= length:
        parser.error(f"FILE must have more than {length} bytes, got {len(text)}")
    optimizer = torch.optim.AdamW(model.to(device).parameters(), lr=2e-3)
    for step in range(1, steps + 1):
        starts = torch.randint(len(text) - length, (8,)).tolist()
        ids = torch.stack([text[i : i + length + 1] for i in starts]).to(device)
        loss = F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % (steps // 10) == 0:
            print(f"step {step}: {loss.item():.3f} nats a byte")
    prompt = text[None, :64].to(device)
    print((bytes(text[:64].tolist()) + model.sample(prompt, 100)).decode(errors="replace"))
    return loss.item()


if __name__ == "__main__":
    main()
