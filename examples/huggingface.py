"""A decoder of transformers with dense and with sparse attention: the same weights.

python examples/huggingface.py                        a small model with random weights
python examples/huggingface.py --model NAME_OR_PATH   a trained one
python examples/huggingface.py --quick                a shorter text

It prints the loss of both on the end of a text, and how they continue it.
"""

import argparse
import sys
from pathlib import Path

import torch
import torch.nn.functional as F

try:
    from native_sparse_attention.hf import use_dense_attention, use_sparse_attention
except ImportError as error:  # without the extra hf
    sys.exit(str(error))

from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM


def load(name):
    """The model and functions from text to ids [1, n] and back."""
    if name is not None:
        tokenizer = AutoTokenizer.from_pretrained(name)
        model = AutoModelForCausalLM.from_pretrained(name, dtype="auto")
        return model, lambda t: tokenizer(t, return_tensors="pt").input_ids, tokenizer.decode
    sizes = dict(hidden_size=128, intermediate_size=256, num_hidden_layers=2)
    heads = dict(num_attention_heads=4, num_key_value_heads=2, initializer_range=0.2)
    tokens = dict(vocab_size=256, bos_token_id=None, eos_token_id=None)
    model = LlamaForCausalLM(LlamaConfig(**sizes, **heads, **tokens))
    decode = lambda ids: bytes(ids.tolist()).decode(errors="replace")  # noqa: E731
    return model, lambda text: torch.tensor([list(text.encode())]), decode


@torch.no_grad()
def loss_and_text(model, ids, last, new):
    """Nats a token over the last tokens, and a greedy continuation."""
    logits = model(ids, use_cache=False, logits_to_keep=last + 1).logits[0, :-1].float()
    loss = F.cross_entropy(logits, ids[0, -last:]).item()
    given = dict(attention_mask=torch.ones_like(ids), max_new_tokens=new, do_sample=False)
    return loss, model.generate(ids, **given)[0, ids.shape[1] :]


def main(argv=None):
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", help="of the hub, or a folder")
    parser.add_argument("--file", default=__file__, help="a text")
    parser.add_argument("--length", type=int, default=2048, help="tokens of the text")
    parser.add_argument("--blocks", type=int, default=4, help="ranked blocks of a query")
    parser.add_argument("--quick", action="store_true")
    args = parser.parse_args(argv)
    if args.quick:
        args.length = 512

    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model, encode, decode = load(args.model)
    model = model.to(device).eval()
    ids = encode(Path(args.file).read_text())[:, : args.length].to(device)
    print(f"{ids.shape[1]} tokens")
    results = {"dense": loss_and_text(model, ids, ids.shape[1] // 2, 16)}
    # 1 initial, 2 local and the ranked blocks of 32 tokens for each query
    blocks = dict(selection_block_size=32, num_local_blocks=2, num_selected_blocks=args.blocks)
    use_sparse_attention(model, **blocks, dense_length=0)
    results["sparse"] = loss_and_text(model, ids, ids.shape[1] // 2, 16)
    use_dense_attention(model)  # as it was
    for name, (loss, found) in results.items():
        print(f"{name:6}  {loss:.3f} nats a token, then {decode(found)!r}")
    return {name: loss for name, (loss, _) in results.items()}


if __name__ == "__main__":
    main()
