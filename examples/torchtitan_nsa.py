"""A Llama of torchtitan with sparse attention: one softmax over selected blocks of each document.

    python examples/torchtitan_nsa.py --steps 20     its debug model on this file, as bytes

`sparse(config)` changes the configuration of any decoder of torchtitan whose layers have an
`inner_attention`; its FSDP, tensor parallelism, activation checkpointing and compile stay as they
are. For its trainer, give `llama3_debugmodel` below as a configuration. It needs pip install
torchtitan.
"""

import argparse
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from native_sparse_attention import native_sparse_attention

try:
    from torchtitan.models.common.attention import (
        VarlenAttention,
        VarlenMetadata,
        create_varlen_metadata_for_document,
    )
    from torchtitan.models.llama3 import llama3_configs
except ImportError as error:
    raise SystemExit(f"examples/torchtitan_nsa.py needs pip install torchtitan: {error}") from None


class SparseAttention(VarlenAttention):
    """In place of torchtitan's attention of packed documents: its tensors and its masks."""

    @dataclass(kw_only=True, slots=True)
    class Config(VarlenAttention.Config):
        settings: dict[str, Any] = field(default_factory=dict)

    def __init__(self, config: Config):
        super().__init__(config)
        self.settings = config.settings

    def forward(
        self, q_BLNH: Tensor, k_BLNH: Tensor, v_BLNH: Tensor, *, attention_masks: VarlenMetadata,
        scale: float | None = None, **options: Any,
    ) -> Tensor:  # fmt: skip
        # [b t h d], by the names of torchtitan: the documents of all rows in one
        q, k, v = (t.flatten(0, 1)[None] for t in (q_BLNH, k_BLNH, v_BLNH))
        out: Tensor = native_sparse_attention(
            q, k, v, ck=k, branches=("selected",), importance="max", scale=scale,
            sliding_window_size=0, compress_block_size=1, compress_block_sliding_stride=1,
            cu_seqlens=attention_masks.cu_seq_q, **self.settings,
        )  # fmt: skip
        return out.view(q_BLNH.shape)


def sparse(config: Any, **settings: Any) -> Any:
    """The configuration of a model with sparse attention in all layers, which it changes."""
    sizes = dict(
        selection_block_size=64, num_selected_blocks=16, num_initial_blocks=1, num_local_blocks=8
    )
    for layer in config.layers:
        layer.attention.inner_attention = SparseAttention.Config(settings=sizes | settings)
    return config


def llama3_debugmodel() -> Any:
    """A configuration of torchtitan's trainer."""
    from torchtitan.models.llama3 import config_registry

    trainer = config_registry.llama3_debugmodel()
    sparse(trainer.model_spec.model)
    return trainer


def main(argv: list[str] | None = None) -> list[float]:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--length", type=int, default=512)
    args = parser.parse_args(argv)
    torch.manual_seed(0)
    config = sparse(
        llama3_configs["debugmodel"](attn_backend="varlen"),
        selection_block_size=16, num_selected_blocks=2, num_local_blocks=2,
    )  # fmt: skip
    config.layers = config.layers[:2]
    model = config.build()
    model.init_states()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    text = torch.tensor([*Path(__file__).read_bytes()])
    positions = torch.arange(args.length) % (args.length // 2)  # two documents
    masks = create_varlen_metadata_for_document(positions[None])
    losses = []
    for step in range(args.steps):
        start = step * args.length % (len(text) - args.length - 1)
        ids = text[start : start + args.length + 1][None]
        logits = model(ids[:, :-1], positions[None], masks)
        loss = F.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        print(f"step {step}: loss {losses[-1]:.3f}")
    return losses


if __name__ == "__main__":
    main()
