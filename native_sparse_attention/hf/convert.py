"""`convert`: the attention of a trained model becomes `SparseAttention`, with its weights.

H  query heads      K  KV heads      D  head dimension
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, TypeVar

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
    user = dict(values)
    bias = float(user.pop("gate_bias"))
    if user["index_heads"] is None:
        user["index_heads"] = parts.settings["kv_heads"]
    config = NSAConfig(**user, **parts.settings)
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
    weight = parts.out.weight
    layer = SparseAttention.from_config(config, **networks).to(weight.device, weight.dtype)
    kv_sets = 1 if config.branch_kv == "shared" else len(config.branches)
    for name, (q, k, v) in parts.projections.items():
        assign(getattr(layer.to_qkv, name), torch.cat([q, *(k, v) * kv_sets]))
    for name, t in parts.out.named_parameters():
        assign(getattr(layer.combine_heads, name), t.detach())
    for norm, scales in zip((layer.q_norm, layer.k_norm), parts.norms, strict=True):
        if norm is not None:
            assign(norm.weight, scales)
    if layer.to_index is not None and config.index_dim == config.dim_head:
        assign(layer.to_index.weight, index_weight(parts, config))
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


def index_weight(parts: Parts, config: NSAConfig) -> Tensor:
    """The first index queries, the mean query of each group, and index keys, the mean key of their
    KV heads, without biases and norms. With `index_heads=kv_heads` and neither in the model, a
    block's score is then the largest (or mean) logit of the mean query."""
    D, (q, k, _), (q_norm, k_norm) = config.dim_head, parts.projections["weight"], parts.norms

    def mean_heads(weight: Tensor, norm: Tensor | None, count: int) -> Tensor:
        weight = weight.unflatten(0, (-1, D))
        if norm is not None:
            weight = weight * norm[:, None]
        return reduce(weight, "(h g) d i -> (h d) i", "mean", h=count)

    scale = parts.settings["scale"] * D**0.5  # scores have the index's own scale
    q = mean_heads(q, q_norm, parts.settings["kv_heads"]) * scale
    return torch.cat((q, mean_heads(k, k_norm, config.index_heads)))


# what is read of a model's attention


class Parts(NamedTuple):
    """One attention module of a model, with rotary features in pairs.

    Attributes:
        settings: of an `NSAConfig`, those that the model decides.
        projections: "weight" and perhaps "bias" of queries, keys and values [heads D, ...].
        out: the projection of the output.
        norms: weights [D] of the norms of heads of queries and keys, or None.
        inv_freq: rotary frequencies [pairs] of the first 2 pairs features; None without positions.
    """

    settings: dict[str, Any]
    projections: dict[str, list[Tensor]]
    out: nn.Linear
    norms: tuple[Any, Any]
    inv_freq: Tensor | None


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
    name, D = type(module).__name__, module.head_dim
    H, K = module.config.num_attention_heads, module.config.num_key_value_heads
    scale, inv_freq, order = float(module.scaling), None, torch.arange(D)
    if getattr(module, "use_rope", True):
        inv_freq, amplitude = frequencies(module, rotary, layer_type)
        pairs = len(inv_freq)
        if amplitude != 1.0 and 2 * pairs < D:
            refuse(
                module,
                "attention_scaling 1 where rotary embedding turns a part of a head",
                f"with {amplitude}",
            )
        scale *= amplitude**2  # of queries and of keys
        # pairs of neighbours, of features i and i + pairs, which transformers rotates together
        order = torch.cat((torch.arange(2 * pairs).view(2, pairs).T.flatten(), order[2 * pairs :]))

    def in_pairs(t: Tensor) -> Tensor:
        return t.unflatten(0, (-1, D))[:, order.to(t.device)].flatten(0, 1)

    names = ["qkv_proj"] if name in FUSED else ["q_proj", "k_proj", "v_proj"]
    linears, projections = [plain(module, linear) for linear in names], {}
    for kind in ("weight", "bias"):
        if getattr(linears[0], kind) is not None:
            q, k, v = torch.cat([getattr(linear, kind).detach() for linear in linears]).split(
                [H * D, K * D, K * D]
            )
            projections[kind] = [in_pairs(q), in_pairs(k), v]
    norms: tuple[Any, Any] = (None, None)
    eps = 1e-6
    if name in NORMED:
        norm, plus_one = module.q_norm, name.startswith("Gemma")
        eps = getattr(norm, "variance_epsilon", getattr(norm, "eps", eps))
        norms = (in_pairs(norm.weight.detach()), in_pairs(module.k_norm.weight.detach()))
        norms = (norms[0] + plus_one, norms[1] + plus_one)
    out = plain(module, "dense" if name == "PhiAttention" else "o_proj")
    settings: dict[str, Any] = dict(
        dim=out.weight.shape[0], dim_head=D, heads=H, kv_heads=K, causal=True, norm=False,
        qkv_bias="bias" in projections, out_bias=out.bias is not None, qk_norm=name in NORMED,
        qk_norm_eps=eps, scale=scale, attention_sinks=False,
        soft_cap=module.attn_logit_softcapping if name in CAPPED else None,
    )  # fmt: skip
    return Parts(settings, projections, out, norms, inv_freq)


def frequencies(module: Any, rotary: Any, layer_type: str) -> tuple[Tensor, float]:
    """The rotary frequencies [pairs] of a layer, and what multiplies its cosines and sines."""
    kind = getattr(rotary, "rope_type", "default")
    kind = kind[layer_type] if isinstance(kind, dict) else kind
    if kind in CHANGING:
        refuse(
            module,
            "rotary frequencies that do not depend on the length of the sequence",
            f"with rope_type={kind!r}",
        )
    prefix = f"{layer_type}_" if hasattr(rotary, f"{layer_type}_inv_freq") else ""
    inv_freq: Tensor = getattr(rotary, f"{prefix}inv_freq")
    return inv_freq.detach().float(), float(getattr(rotary, f"{prefix}attention_scaling", 1.0))


def plain(module: Any, name: str) -> nn.Linear:
    """The projection of this name."""
    linear: nn.Linear = getattr(module, name)
    if type(linear) is not nn.Linear or not linear.weight.is_floating_point():
        refuse(
            module,
            "projections that are nn.Linear: merge adapters, and load without quantization",
            f"with {name} of {type(linear).__name__}",
        )
    if linear.weight.is_meta:
        refuse(module, "loaded weights", f"with {name} on the meta device")
    if hasattr(linear.weight, "device_mesh"):
        refuse(
            module,
            "whole weights: convert it before fully_shard, and load it without tensor parallelism",
            f"with {name} as a DTensor",
        )
    return linear


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
    state = {
        name + key.partition(end)[2]: t
        for file in names
        for key, t in load_file(folder / file).items()
        for name, end in ends.items()
        if f".{end}.attention." in f".{key}"
    }
    try:
        loaded = model.load_state_dict(state, strict=False)
    except RuntimeError as error:
        raise ValueError(
            f"settings must keep the shapes of weights, got {sorted(settings)}, for which "
            f"{' '.join(str(error).split())}"
        ) from None
    prefixes = tuple(f"{name}." for name in layers)
    wrong = {
        kind: {key for key in getattr(loaded, kind) if key.startswith(prefixes)}
        | {key for key in about[kind] if not key.startswith(prefixes)}
        for kind in ("missing_keys", "unexpected_keys")
    }
    if any(wrong.values()):
        raise ValueError(f"path must hold the weights of this conversion, got {wrong}")
    return model.eval()
