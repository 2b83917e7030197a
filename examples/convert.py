"""A trained decoder becomes one of SparseAttention layers, whose ranking learns from its attention.

python examples/convert.py                        a tiny model, first trained on this file
python examples/convert.py --model NAME_OR_PATH   a trained one
python examples/convert.py --quick                a few steps

It prints the loss on the text: dense, sparse before the ranking has learned, and after.
"""

import argparse
import sys
from pathlib import Path

import torch

try:
    from native_sparse_attention.hf import convert, distill
except ImportError as error:  # without the extra hf
    sys.exit(str(error))

from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from native_sparse_attention.recipes import set_dense


def rows_of(ids, length):
    """Ids [n] as rows [N, length], each half a row after the one before."""
    return ids.unfold(0, length, length // 2)


def trained(ids, length, steps):
    """A tiny Llama that has seen the text, for a run without a network."""
    sizes = dict(hidden_size=64, intermediate_size=128, num_hidden_layers=2, vocab_size=256)
    tokens = dict(bos_token_id=None, eos_token_id=None)
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, **tokens)).to(ids.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    rows = rows_of(ids, length)
    for _ in range(steps):
        batch = rows[torch.randint(len(rows), (4,), device=ids.device)]
        optimizer.zero_grad()
        model(batch, labels=batch, use_cache=False).loss.backward()
        optimizer.step()
    return model


@torch.no_grad()
def loss_of(model, rows):
    return sum(
        model(row[None], labels=row[None], use_cache=False).loss.item() for row in rows
    ) / len(rows)


def main(argv=None):
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", help="of the hub, or a folder; see docs/huggingface.md")
    parser.add_argument("--file", default=__file__, help="a text")
    parser.add_argument("--length", type=int, default=512, help="tokens of a row")
    parser.add_argument("--steps", type=int, default=100, help="of distillation")
    parser.add_argument("--save", help="a folder for the converted model")
    parser.add_argument("--quick", action="store_true")
    args = parser.parse_args(argv)
    if args.quick:
        args.steps, args.length = 20, 256

    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    text = Path(args.file).read_text()
    if args.model is None:
        ids = torch.tensor(list(text.encode()), device=device)
        model = trained(ids, args.length, 2 * args.steps)
    else:
        ids = AutoTokenizer.from_pretrained(args.model)(text, return_tensors="pt").input_ids[0]
        ids = ids.to(device)
        model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32).to(device)
    model = model.eval()
    rows = rows_of(ids, args.length)
    losses = {"dense": loss_of(model, rows)}
    # 1 initial, 1 local and 4 ranked blocks of 16 tokens; the index begins as a mean of heads
    blocks = dict(selection_block_size=16, num_local_blocks=1, num_selected_blocks=4)
    convert(model, **blocks, dense_length=0, index_heads=1)
    losses["sparse"] = loss_of(model, rows)
    history = distill(model, rows, steps=args.steps, lr=3e-3)
    losses["distilled"] = loss_of(model, rows)
    for name, loss in losses.items():
        print(f"{name:9}  {loss:.3f} nats a token")
    print(f"loss of the rankings: {history[0]['ranking']:.3f}, then {history[-1]['ranking']:.3f}")
    set_dense(model, True)  # without a selection it is the model that it was
    losses["dense again"] = loss_of(model, rows)
    if args.save:
        model.save_pretrained(args.save)  # load_converted(args.save) loads it
    return losses, [step["ranking"] for step in history]


if __name__ == "__main__":
    main()
