"""`convert`: the attention of a trained model becomes `SparseAttention`, with its weights.

H  query heads      K  KV heads      D  head dimension
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import torch
import transformers
from einops import reduce
from torch import Tensor, nn
from transformers import AutoConfig

from ..attention import SparseAttention
from ..checks.keywords import check_keywords
from ..checks.scalars import check_factor, shown
from ..compress import MeanPool
from ..config import NSAConfig
from ..gate import GateLinear
from ..initialization import assign
from .attention import check_model
from .modeling import NSAAttention
from .settings import CONVERTED_KEY as KEY
from .settings import NAME, check_widths, named_settings, without_notes

Model = TypeVar("Model")

# what `convert` can read: projections of q, k and v, or one of all three
SEPARATE = {
    "LlamaAttention", "MistralAttention", "Qwen2Attention", "Qwen3Attention", "SmolLM3Attention",
    "PhiAttention", "GraniteAttention", "GemmaAttention", "Gemma2Attention", "Gemma3Attention",
    "MixtralAttention", "Qwen2MoeAttention", "Qwen3MoeAttention",
}  # fmt: skip
FUSED = {"Phi3Attention"}
# norms of every head of queries and keys
NORMED = {"Qwen3Attention", "Qwen3MoeAttention", "Gemma3Attention"}
CAPPED = {"Gemma2Attention"}
# frequencies of these change with the length of the sequence
CHANGING = ("dynamic", "longrope")

# the model decides these, and these have one form
OF_MODEL = (
    "dim", "dim_head", "heads", "kv_heads", "causal", "norm", "qkv_bias", "out_bias", "qk_norm",
    "qk_norm_eps", "scale", "soft_cap", "attention_sinks",
)  # fmt: skip
OF_NETWORKS = ("compress_mlp_expand_factor", "block_sizes")
FREE = {f.name: f.default for f in fields(NSAConfig) if f.name not in (*OF_MODEL, *OF_NETWORKS)}

# one softmax over initial, local and ranked blocks: tokens rank by learned queries and keys
ONE_SOFTMAX: dict[str, Any] = dict(
    branches=("selected",),
    importance="index",
    rank_rotated=True,
    compress_block_size=1,
    compress_block_sliding_stride=1,
    selection_block_size=64,
    num_selected_blocks=16,
    num_initial_blocks=1,
    num_local_blocks=8,
    dense_length=8192,
)
# the paper's numbers
BRANCHES: dict[str, Any] = dict(
    importance="probs", num_selected_blocks=13, num_initial_blocks=1, num_local_blocks=2
)
# logits of open gates; sigmoid(12) = 1 - 6e-6
NAMES = tuple(FREE)
FREE["gate_bias"] = 12.0


def convert(
    model: Model, config: NSAConfig | Mapping[str, Any] | None = None, **settings: Any
) -> Model:
    """Replace the full attention of a trained decoder by `SparseAttention` layers with its weights.

    With `branches=("selected",)`, the default, the model is dense attention up to the length that
    its blocks or `dense_length` cover. With more branches a gate begins open for one branch, the
    window (without one the selected branch), and closed for the others: while that branch covers
    the sequence, the outputs are those of the model.

    Args:
        model: a loaded decoder of a family in `SEPARATE` or `FUSED`. It is changed in place.
        config: an `NSAConfig` or a dict of its settings. Without config and settings, those that
            `model.config.nsa_converted` keeps.
        settings: single settings of `NSAConfig`, which replace those of `config`. The model decides
            dim, dim_head, heads, kv_heads, causal, norm, the biases, qk_norm, scale and soft_cap.
            `index_heads` is kv_heads by default. Windows are compressed by their mean. `gate_bias`
            (12) is the first logit of open gates; closed ones have its negative.

    Returns:
        The model.

    Raises:
        ValueError: a model of another family or without an equivalent, a setting that is unknown,
            out of range or decided by the model, or branches that cannot begin as full attention.
    """
    decoder = check_model(model)
    kept = getattr(decoder.config, KEY, None) or {}
    user = named_settings(kept if config is None and not settings else config, NAMES)
    values = with_defaults(user | settings)
    base = decoder.base_model
    kinds = getattr(decoder.config, "layer_types", None)
    layers = [
        (index, layer, "full_attention" if kinds is None else kinds[index])
        for index, layer in enumerate(getattr(base, "layers", []))
        if kinds is None or kinds[index] == "full_attention"
    ]
    if not layers:
        raise ValueError(f"model must have a list of layers, got none in {type(base).__name__}")
    for _, layer, _ in layers:
        check_family(getattr(layer, "self_attn", layer))
    rotary = getattr(base, "rotary_emb", None)
    if rotary is None:
        raise ValueError(
            f"model must have a rotary embedding, rotary_emb, got none in {shown(type(base))}"
        )
    replaced = []
    for _, layer, kind in layers:  # all of them, before the model changes
        parts = parts_of(layer.self_attn, rotary, kind)
        if isinstance(config, NSAConfig):
            check_widths("config", config, parts.settings)
        replaced.append(sparse_layer(parts, values))
    for attention, (index, layer, _) in zip(replaced, layers, strict=True):
        module, is_first = layer.self_attn, index == layers[0][0]
        freeze(attention, module)
        layer.self_attn = NSAAttention(attention, index, module.attention_dropout, is_first)
        layer.self_attn.train(module.training)
    checked = {name: getattr(replaced[0].config, name, values[name]) for name in FREE}
    setattr(decoder.config, KEY, checked | dict(branches=list(checked["branches"])))
    decoder.set_attn_implementation(NAME)
    return model


def with_defaults(settings: dict[str, Any]) -> dict[str, Any]:
    """All settings that the model does not decide.

    Raises:
        ValueError: an unknown setting, one that the model decides, or branches that cannot begin
            as full attention.
    """
    for name in (*OF_MODEL, *OF_NETWORKS):
        if name in settings:
            raise ValueError(
                f"{name} must be left out: the model decides it, got {shown(settings[name])}"
            )
    check_keywords(settings, FREE)
    check_factor("gate_bias", settings.get("gate_bias", FREE["gate_bias"]))
    branches = settings.get("branches", ONE_SOFTMAX["branches"])
    branches = tuple(branches) if isinstance(branches, (list, tuple)) else branches
    alone = branches == ("selected",)
    values = FREE | (ONE_SOFTMAX if alone else BRANCHES) | settings | dict(branches=branches)
    if "compress_block_size" in settings and "compress_block_sliding_stride" not in settings:
        values["compress_block_sliding_stride"] = settings["compress_block_size"]
    elif not alone and values["compress_block_sliding_stride"] is None:
        values["compress_block_sliding_stride"] = values["compress_block_size"] // 2
    if "index_heads" not in settings:
        values["index_heads"] = None
    if isinstance(branches, tuple) and not {"selected", "window"} & set(branches):
        raise ValueError(
            "branches must hold 'selected' or 'window', one of which begins as the attention of "
            f"the model, got {shown(branches)}"
        )
    return values


def sparse_layer(parts: Parts, values: Mapping[str, Any]) -> SparseAttention:
    """A layer with the weights of an attention module."""
    weight = parts.q[0]
    own = dict(values)
    bias = float(own.pop("gate_bias"))
    if own["index_heads"] is None:
        own["index_heads"] = parts.kv_heads
    config = NSAConfig(**own, **parts.settings)
    networks: dict[str, Any] = {}
    if "compressed" in config.branches:
        networks["compress_mlp"] = MeanPool()
    if len(config.branches) > 1:
        first = "window" if "window" in config.branches else "selected"
        start = tuple(bias if name == first else -bias for name in config.branches)
        networks["strategy_combine_mlp"] = GateLinear(config.dim, config.heads, start)
    if parts.inv_freq is None:
        networks["rotary_emb"] = False
    else:
        networks["inv_freq"] = parts.inv_freq.cpu()
    layer = SparseAttention.from_config(config, **networks).to(weight.device, weight.dtype)
    kv_sets = 1 if config.branch_kv == "shared" else len(config.branches)
    for name, i in (("weight", 0), ("bias", 1)):
        projected = [parts.q[i], *(parts.k[i], parts.v[i]) * kv_sets]
        there = [t for t in projected if t is not None]
        if there:
            assign(getattr(layer.to_qkv, name), torch.cat(there))
        if getattr(parts.out, name) is not None:
            assign(getattr(layer.combine_heads, name), getattr(parts.out, name).detach())
    for norm, scales in ((layer.q_norm, parts.q_norm), (layer.k_norm, parts.k_norm)):
        if norm is not None and scales is not None:
            assign(norm.weight, scales)
    start_ranking(layer, parts)
    return layer


def freeze(layer: SparseAttention, module: nn.Module) -> None:
    """Freeze what comes from frozen weights of the module; queries, keys and values together, if
    none of their projections is trained."""
    trained = {name.split(".")[0] for name, p in module.named_parameters() if p.requires_grad}
    sources = (
        (layer.to_qkv, {"q_proj", "k_proj", "v_proj", "qkv_proj"}),
        (layer.combine_heads, {"o_proj", "dense"}),
        (layer.q_norm, {"q_norm"}),
        (layer.k_norm, {"k_norm"}),
    )
    for copied, names in sources:
        if copied is not None and not trained & names:
            copied.requires_grad_(False)


def start_ranking(layer: SparseAttention, parts: Parts) -> None:
    """Let index queries begin as the mean query of their group, and index keys as the mean key of
    their KV heads, without biases and norms. With `index_heads=kv_heads` and neither in the model,
    a block's score is then the largest (or mean) logit of the mean query. An index of another width
    keeps random weights."""
    if layer.to_index is None or layer.index_dim != layer.dim_head:
        return

    def heads(weight: Tensor, norm: Tensor | None, count: int) -> Tensor:
        weight = weight.unflatten(0, (-1, parts.dim_head))
        if norm is not None:
            weight = weight * norm[:, None]
        return reduce(weight, "(h g) d i -> (h d) i", "mean", h=count)

    q = heads(parts.q[0], parts.q_norm, parts.kv_heads)
    k = heads(parts.k[0], parts.k_norm, layer.index_heads)
    # scores have the index's own scale
    assign(layer.to_index.weight, torch.cat((q * (parts.scale * parts.dim_head**0.5), k)))


# what is read of a model's attention


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


# saved models


def load_converted(path: str | Path, **settings: Any) -> nn.Module:
    """A converted model from the folder that its `save_pretrained` wrote, in inference mode.

    Args:
        path: a folder.
        settings: settings that replace the kept ones, of those that change no weights.

    Raises:
        ValueError: a folder of a model that is not converted, or without safetensors.
    """
    from safetensors.torch import load_file

    folder = Path(path) if isinstance(path, (str, Path)) else None
    if folder is None or not (folder / "config.json").is_file():
        raise ValueError(f"path must be a folder with config.json, got {shown(path)}")
    config = AutoConfig.from_pretrained(folder)
    text = config.get_text_config(decoder=True)
    kept = getattr(text, KEY, None)
    if not kept:
        raise ValueError(f"path must be a folder of a converted model, got {shown(str(path))}")
    index = folder / "model.safetensors.index.json"
    names = ["model.safetensors"]
    if index.exists():
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    if not (folder / names[0]).exists():
        raise ValueError(f"path must have model.safetensors, got {shown(str(path))}")
    # all but attention as transformers loads it: its formats of experts, buffers in float32
    architecture = getattr(transformers, config.architectures[0])
    with without_notes():  # of weights of attention that it does not find
        model, about = architecture.from_pretrained(
            folder, dtype=config.dtype or torch.float32, output_loading_info=True
        )
    convert(model if text is config else model.get_decoder(), dict(kept) | settings)
    layers = [name for name, m in model.named_modules() if isinstance(m, NSAAttention)]
    # a model of several parts may have another prefix in the file
    ends = {name: name[name.rindex("layers.") :] for name in layers}
    state = {}
    for file in names:
        for key, t in load_file(folder / file).items():
            for name, end in ends.items():
                if f".{end}.attention." in f".{key}":
                    state[name + key.partition(end)[2]] = t
    own = tuple(f"{name}." for name in layers)
    shapes = {key: t.shape for key, t in model.state_dict().items() if key.startswith(own)}
    wanted = set(shapes)
    others = {n: {key for key in about[n] if not key.startswith(own)} for n in about}
    missing = sorted(wanted - state.keys() | others["missing_keys"])
    unexpected = sorted(state.keys() - wanted | others["unexpected_keys"])
    if missing or unexpected:
        raise ValueError(
            f"path must hold the weights of this conversion, got missing {missing} and unexpected "
            f"{unexpected}"
        )
    if changed := [key for key, shape in shapes.items() if state[key].shape != shape]:
        key = changed[0]
        raise ValueError(
            f"settings must keep the shapes of weights, got {sorted(settings)}, for which {key} "
            f"has shape {list(shapes[key])} and not {list(state[key].shape)}"
        )
    model.load_state_dict(state, strict=False)
    return model.eval()
