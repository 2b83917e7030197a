"""The attention modules of transformers that `convert` can read, and what it reads of them.

H  query heads      K  KV heads      D  head dimension
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from ..checks.scalars import shown

SEPARATE = {
    "LlamaAttention", "MistralAttention", "Qwen2Attention", "Qwen3Attention", "SmolLM3Attention",
    "PhiAttention", "GraniteAttention", "GemmaAttention", "Gemma2Attention", "Gemma3Attention",
    "MixtralAttention", "Qwen2MoeAttention", "Qwen3MoeAttention",
}  # fmt: skip
FUSED = {"Phi3Attention"}
# every head of queries and keys
NORMED = {"Qwen3Attention", "Qwen3MoeAttention", "Gemma3Attention"}
CAPPED = {"Gemma2Attention"}
# frequencies of these change with the length of the sequence
CHANGING = ("dynamic", "longrope")


@dataclass(frozen=True)
class Parts:
    """The weights and numbers of one attention module, with rotary features in pairs.

    Attributes:
        q, k, v: projections of H, K and K heads, each a weight [heads D, dim] and a bias or None.
        out: the projection of the output.
        q_norm, k_norm: weights [D] of the norms of heads, or None; `eps` is their epsilon.
        inv_freq: rotary frequencies [pairs] of the first 2 pairs features; None without positions.
    """

    heads: int
    kv_heads: int
    dim_head: int
    q: tuple[Tensor, Tensor | None]
    k: tuple[Tensor, Tensor | None]
    v: tuple[Tensor, Tensor | None]
    out: nn.Linear
    q_norm: Tensor | None
    k_norm: Tensor | None
    eps: float | None
    scale: float
    soft_cap: float | None
    inv_freq: Tensor | None

    @property
    def settings(self) -> dict[str, Any]:
        """The settings of an `NSAConfig` that the model decides."""
        return dict(
            dim=self.q[0].shape[1], dim_head=self.dim_head, heads=self.heads,
            kv_heads=self.kv_heads, causal=True, norm=False, qkv_bias=self.q[1] is not None,
            out_bias=self.out.bias is not None, qk_norm=self.q_norm is not None,
            qk_norm_eps=1e-6 if self.eps is None else self.eps, scale=self.scale,
            soft_cap=self.soft_cap, attention_sinks=False,
        )  # fmt: skip


def refuse(module: Any, expected: str, got: str) -> NoReturn:
    raise ValueError(f"model must have {expected}, got {type(module).__name__} {got}")


def check_family(module: Any) -> None:
    """Check that a module is of a family that `convert` can read.

    Raises:
        ValueError: it is not; the message names the families.
    """
    name, known = type(module).__name__, sorted(SEPARATE | FUSED)
    if name not in known:
        raise ValueError(
            f"model must have attention of {', '.join(known)}, got {name}: use_sparse_attention "
            "takes more models, without weights of its own"
        )
    if getattr(module, "qk_layernorm", False):
        refuse(module, "RMSNorm of queries and keys or none", "with LayerNorm (qk_layernorm)")


def parts_of(module: Any, rotary: Any, layer_type: str) -> Parts:
    """What `convert` reads of an attention module and of the model's rotary embedding.

    Raises:
        ValueError: a module without an equivalent in `SparseAttention`.
    """
    check_family(module)
    config, name = module.config, type(module).__name__
    H, K, D = config.num_attention_heads, config.num_key_value_heads, module.head_dim
    scale = float(module.scaling)
    inv_freq, order = None, torch.arange(D)
    if getattr(module, "use_rope", True):
        inv_freq, amplitude = frequencies(module, rotary, layer_type)
        order = in_pairs(len(inv_freq), D)
        if amplitude != 1.0 and 2 * len(inv_freq) < D:
            refuse(
                module,
                "attention_scaling 1 where rotary embedding turns a part of a head",
                f"with {amplitude}",
            )
        scale *= amplitude**2  # of queries and of keys
    q, k, v = projections(module, H * D, K * D)
    norms: list[Tensor | None] = [None, None]
    eps = None
    if name in NORMED:
        own = module.q_norm, module.k_norm
        eps = getattr(own[0], "variance_epsilon", getattr(own[0], "eps", None))
        plus_one = name.startswith("Gemma")
        norms = [(n.weight.detach() + plus_one)[order.to(n.weight.device)] for n in own]
    return Parts(
        heads=H, kv_heads=K, dim_head=D, q=reordered(q, order), k=reordered(k, order), v=v,
        out=plain(module, "dense" if name == "PhiAttention" else "o_proj"),
        q_norm=norms[0], k_norm=norms[1], eps=eps, scale=scale,
        soft_cap=module.attn_logit_softcapping if name in CAPPED else None, inv_freq=inv_freq,
    )  # fmt: skip


def frequencies(module: Any, rotary: Any, layer_type: str) -> tuple[Tensor, float]:
    """The rotary frequencies [pairs] of a layer, and what multiplies its cosines and sines."""
    kind = getattr(rotary, "rope_type", "default")
    if isinstance(kind, dict):
        kind = kind[layer_type]
    if kind in CHANGING:
        refuse(
            module,
            "rotary frequencies that do not depend on the length of the sequence",
            f"with rope_type={kind!r}",
        )
    prefix = f"{layer_type}_" if hasattr(rotary, f"{layer_type}_inv_freq") else ""
    inv_freq: Tensor = getattr(rotary, f"{prefix}inv_freq")
    return inv_freq.detach().float(), float(getattr(rotary, f"{prefix}attention_scaling", 1.0))


def in_pairs(pairs: int, width: int) -> Tensor:
    """The order [width] of features that makes pairs of neighbours, 2 i and 2 i + 1, of features
    i and i + pairs, which transformers rotates together."""
    rotated = torch.arange(2 * pairs).view(2, pairs).T.flatten()
    return torch.cat((rotated, torch.arange(2 * pairs, width)))


def plain(module: Any, name: str) -> nn.Linear:
    """The projection of this name."""
    found: nn.Linear = getattr(module, name)
    if type(found) is not nn.Linear or not found.weight.is_floating_point():
        refuse(
            module,
            "projections that are nn.Linear: merge adapters, and load without quantization",
            f"with {name} of {type(found).__name__}",
        )
    if found.weight.is_meta:
        refuse(module, "loaded weights", f"with {name} on the meta device")
    if hasattr(found.weight, "device_mesh"):
        refuse(
            module,
            "whole weights: convert it before fully_shard, and load it without tensor parallelism",
            f"with {name} as a DTensor",
        )
    return found


def projections(module: Any, q: int, kv: int) -> list[tuple[Tensor, Tensor | None]]:
    """Weights and biases of queries, keys and values, whose widths are q, kv and kv."""
    if type(module).__name__ in FUSED:
        fused = plain(module, "qkv_proj")
        weights = fused.weight.detach().split([q, kv, kv])
        biases = (None,) * 3 if fused.bias is None else fused.bias.detach().split([q, kv, kv])
        return list(zip(weights, biases, strict=True))
    found = [plain(module, f"{name}_proj") for name in "qkv"]
    return [(p.weight.detach(), None if p.bias is None else p.bias.detach()) for p in found]


def reordered(
    projection: tuple[Tensor, Tensor | None], order: Tensor
) -> tuple[Tensor, Tensor | None]:
    """A projection with the features of each head in this order [D]."""

    def each(t: Tensor) -> Tensor:
        return t.unflatten(0, (-1, len(order)))[:, order.to(t.device)].flatten(0, 1)

    weight, bias = projection
    return each(weight), None if bias is None else each(bias)


def rotary_of(decoder: Any) -> Any:
    """The rotary embedding of a decoder.

    Raises:
        ValueError: it has none of its own.
    """
    found = getattr(decoder, "rotary_emb", None)
    if found is None:
        raise ValueError(
            f"model must have a rotary embedding, rotary_emb, got none in {shown(type(decoder))}"
        )
    return found
