"""`convert`: the attention of a trained model becomes `SparseAttention`, with its weights.

H  query heads      K  KV heads      D  head dimension
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
import transformers
from einops import reduce
from torch import Tensor, nn
from transformers import AutoConfig
from transformers.utils import logging

from ..attention import SparseAttention
from ..checks.scalars import check_factor, shown
from ..compress import MeanPool
from ..config import NSAConfig
from ..gate import GateLinear
from ..initialization import assign
from .attention import check_model
from .configuration import CONVERTED_KEY as KEY
from .configuration import NAME, free_settings, kept_settings, layer_config
from .modeling import NSAAttention

Model = TypeVar("Model")

# modules that `convert` can read; those with `qkv_proj` have one projection of q, k and v, those
# with `q_norm` norms of every head of queries and keys
FAMILIES = {
    f"{name}Attention"
    for name in (
        "Llama", "Mistral", "Mixtral", "Qwen2", "Qwen2Moe", "Qwen3", "Qwen3Moe", "SmolLM3",
        "Granite", "Gemma", "Gemma2", "Gemma3", "Phi", "Phi3",
    )
}  # fmt: skip

# all settings but those that the model decides, or that have one form
SETTINGS = free_settings(
    (
        "kv_heads", "causal", "norm", "qkv_bias", "out_bias", "qk_norm", "qk_norm_eps", "scale",
        "soft_cap", "attention_sinks", "compress_mlp_expand_factor", "block_sizes",
    )
)  # fmt: skip
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
    importance="probs", compress_block_sliding_stride=16, num_selected_blocks=13,
    num_initial_blocks=1, num_local_blocks=2,
)  # fmt: skip


def convert(
    model: Model, config: NSAConfig | Mapping[str, Any] | None = None, **settings: Any
) -> Model:
    """Replace the full attention of a trained decoder by `SparseAttention` layers with its weights.

    With `branches=("selected",)`, the default, the model is dense attention up to the length that
    its blocks or `dense_length` cover. With more branches a gate begins open for one branch, the
    window (without one the selected branch), and closed for the others: while that branch covers
    the sequence, the outputs are those of the model.

    Args:
        model: a loaded decoder with attention of `FAMILIES`. It is changed in place.
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
    if config is None and not settings:
        config = getattr(decoder.config, KEY, None)
    if isinstance(config, Mapping):
        settings = {**config, **settings}
        config = None
    # logits of open gates; sigmoid(12) = 1 - 6e-6
    bias = check_factor("gate_bias", settings.pop("gate_bias", 12.0))
    base, kinds = decoder.base_model, getattr(decoder.config, "layer_types", None)
    layers = {
        index: layer
        for index, layer in enumerate(getattr(base, "layers", []))
        if kinds is None or kinds[index] == "full_attention"
    }
    rotary = getattr(base, "rotary_emb", None)
    for name, part in (("layers", layers), ("rotary_emb", rotary)):
        if not part:
            raise ValueError(f"model must have {name}, got none in a {type(base).__name__}")
    # all of them, before the model changes
    replaced = {
        index: sparse_layer(getattr(layer, "self_attn", layer), rotary, config, settings, bias)
        for index, layer in layers.items()
    }
    first = min(replaced)
    for index, attention in replaced.items():
        module = layers[index].self_attn
        new = NSAAttention(attention, index, module.attention_dropout, index == first)
        layers[index].self_attn = new.train(module.training)
    saved = kept_settings(replaced[first].config, SETTINGS) | dict(gate_bias=bias)
    setattr(decoder.config, KEY, saved)
    decoder.set_attn_implementation(NAME)
    return model


def sparse_layer(
    module: Any,
    rotary: Any,
    user: NSAConfig | None,
    settings: Mapping[str, Any],
    gate_bias: float,
) -> SparseAttention:
    """A layer with the weights of an attention module, frozen where its weights are."""
    parts = read_module(module, rotary)
    branches = settings.get("branches", getattr(user, "branches", ("selected",)))
    is_alone = isinstance(branches, (list, tuple)) and [*branches] == ["selected"]
    defaults = SETTINGS | (ONE_SOFTMAX if is_alone else BRANCHES)
    defaults |= dict(index_heads=parts.settings["kv_heads"])
    config = layer_config(user, settings, defaults, parts.settings)
    first = "window" if "window" in config.branches else "selected"
    if first not in config.branches:
        raise ValueError(
            "branches must hold 'selected' or 'window', one of which begins as the attention of "
            f"the model, got {shown(config.branches)}"
        )
    networks: dict[str, Any] = {}
    if "compressed" in config.branches:
        networks["compress_mlp"] = MeanPool()
    if len(config.branches) > 1:
        start = tuple(gate_bias if name == first else -gate_bias for name in config.branches)
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
    trained = {name.split(".")[0] for name, p in module.named_parameters() if p.requires_grad}
    for copied, sources in (  # queries, keys and values are one weight
        (layer.to_qkv, {"q_proj", "k_proj", "v_proj", "qkv_proj"}),
        (layer.combine_heads, {"o_proj", "dense"}),
        (layer.q_norm, {"q_norm"}),
        (layer.k_norm, {"k_norm"}),
    ):
        if copied is not None and not trained & sources:
            copied.requires_grad_(False)
    return layer


def index_weight(parts: Parts, config: NSAConfig) -> Tensor:
    """The first index queries, the mean query of each group, and index keys, the mean key of their
    KV heads, without biases and norms. With `index_heads=kv_heads` and neither in the model, a
    block's score is then the largest (or mean) logit of the mean query."""
    D, K = config.dim_head, parts.settings["kv_heads"]
    means = []
    for weight, norm, heads in zip(
        parts.projections["weight"], parts.norms, (K, config.index_heads), strict=False
    ):
        weight = weight.unflatten(0, (-1, D))
        if norm is not None:
            weight = weight * norm[:, None]
        means.append(reduce(weight, "(h g) d i -> (h d) i", "mean", h=heads))
    scale = parts.settings["scale"] * D**0.5  # scores have the index's own scale
    return torch.cat((means[0] * scale, means[1]))


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


def read_module(module: Any, rotary: Any) -> Parts:
    """What `convert` reads of an attention module and of the model's rotary embedding.

    Raises:
        ValueError: a module without an equivalent in `SparseAttention`.
    """
    name = type(module).__name__
    if name not in FAMILIES:
        raise ValueError(
            f"model must have attention of {', '.join(sorted(FAMILIES))}, got {name}: "
            "use_sparse_attention takes more models, without weights of its own"
        )
    D = module.head_dim
    H, K = module.config.num_attention_heads, module.config.num_key_value_heads
    names = ["qkv_proj"] if hasattr(module, "qkv_proj") else ["q_proj", "k_proj", "v_proj"]
    out_name = "dense" if hasattr(module, "dense") else "o_proj"
    inv_freq, amplitude, pairs, kind = None, 1.0, 0, "default"
    if getattr(module, "use_rope", True):
        kind = getattr(rotary, "rope_type", "default")
        kind = kind["full_attention"] if isinstance(kind, dict) else kind
        prefix = "full_attention_" if hasattr(rotary, "full_attention_inv_freq") else ""
        inv_freq = getattr(rotary, f"{prefix}inv_freq").detach().float()
        amplitude = float(getattr(rotary, f"{prefix}attention_scaling", 1.0))
        pairs = len(inv_freq)
    problem = None
    if getattr(module, "qk_layernorm", False):
        problem = f"RMSNorm of queries and keys or none, got {name} with LayerNorm (qk_layernorm)"
    elif kind in ("dynamic", "longrope"):
        problem = (
            "rotary frequencies that do not depend on the length of the sequence, got "
            f"{name} with rope_type={kind!r}"
        )
    elif amplitude != 1.0 and 2 * pairs < D:
        problem = (
            "attention_scaling 1 where rotary embedding turns a part of a head, got "
            f"{name} with {amplitude}"
        )
    linears = {n: getattr(module, n) for n in (*names, out_name)}
    for n, linear in linears.items():
        if type(linear) is not nn.Linear or not linear.weight.is_floating_point():
            problem = (
                "projections that are nn.Linear: merge adapters, and load without quantization, "
                f"got {name} with {n} of {type(linear).__name__}"
            )
        elif linear.weight.is_meta:
            problem = f"loaded weights, got {name} with {n} on the meta device"
        elif hasattr(linear.weight, "device_mesh"):
            problem = (
                "whole weights: convert it before fully_shard, and load it without tensor "
                f"parallelism, got {name} with {n} as a DTensor"
            )
    if problem:
        raise ValueError(f"model must have {problem}")

    # pairs of neighbours, of features i and i + pairs, which transformers rotates together
    order = torch.arange(D)
    order = torch.cat((order[: 2 * pairs].view(2, pairs).T.flatten(), order[2 * pairs :]))

    def pair(t: Tensor) -> Tensor:
        return t.unflatten(0, (-1, D))[:, order.to(t.device)].flatten(0, 1)

    projections = {}
    for part in ("weight", "bias"):
        if getattr(linears[names[0]], part) is not None:
            qkv = torch.cat([getattr(linears[n], part).detach() for n in names])
            q, k, v = qkv.split([H * D, K * D, K * D])
            projections[part] = [pair(q), pair(k), v]
    norms: tuple[Any, Any] = (None, None)
    eps, is_normed = 1e-6, hasattr(module, "q_norm")
    if is_normed:
        eps = getattr(module.q_norm, "variance_epsilon", getattr(module.q_norm, "eps", eps))
        plus = name.startswith("Gemma")
        q, k = (pair(norm.weight.detach()) + plus for norm in (module.q_norm, module.k_norm))
        norms = (q, k)
    out = linears[out_name]
    settings: dict[str, Any] = dict(
        dim=out.weight.shape[0], dim_head=D, heads=H, kv_heads=K, causal=True, norm=False,
        qkv_bias="bias" in projections, out_bias=out.bias is not None, qk_norm=is_normed,
        qk_norm_eps=eps, attention_sinks=False, compress_mlp_expand_factor=1.0, block_sizes=None,
        scale=float(module.scaling) * amplitude**2,  # of queries and of keys
        soft_cap=module.attn_logit_softcapping if name == "Gemma2Attention" else None,
    )  # fmt: skip
    return Parts(settings, projections, out, norms, inv_freq)


# saved models


@contextmanager
def quiet() -> Iterator[None]:
    """Keep notes and progress bars of transformers from the terminal."""
    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()


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
    saved = getattr(text, KEY, None)
    if not saved:
        raise ValueError(f"path must be a folder of a converted model, got {shown(str(path))}")
    files = sorted(folder.glob("model*.safetensors"))
    if not files:
        raise ValueError(f"path must have model.safetensors, got {shown(str(path))}")
    # all but attention as transformers loads it: its formats of experts, buffers in float32
    architecture = getattr(transformers, config.architectures[0])
    with quiet():  # of weights of attention that it does not find
        model, report = architecture.from_pretrained(
            folder, dtype=config.dtype or torch.float32, output_loading_info=True
        )
    convert(model if text is config else model.get_decoder(), dict(saved) | settings)
    layers = [name for name, m in model.named_modules() if isinstance(m, NSAAttention)]
    # a model of several parts may have another prefix in the file
    ends = {name: name[name.rindex("layers.") :] for name in layers}
    state = {
        name + key.partition(end)[2]: t
        for file in files
        for key, t in load_file(file).items()
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
        | {key for key in report[kind] if not key.startswith(prefixes)}
        for kind in ("missing_keys", "unexpected_keys")
    }
    if any(wrong.values()):
        raise ValueError(f"path must hold the weights of this conversion, got {wrong}")
    return model.eval()
