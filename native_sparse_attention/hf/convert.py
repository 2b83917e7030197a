"""`convert`: the attention of a trained model becomes `SparseAttention`, with its weights; and what
loads such models. H: query heads. K: KV heads. D: head dimension."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from einops import reduce
from torch import Tensor, nn
from transformers.quantizers import HfQuantizer, register_quantization_config, register_quantizer
from transformers.utils import logging
from transformers.utils.quantization_config import QuantizationConfigMixin

from ..attention import SparseAttention
from ..checks import check_branches, check_factor, check_ranks, check_share_ranking, refusal
from ..compress import MeanPool
from ..config import GIVEN, NSAConfig
from ..initialization import assign, gate_linear
from ..presets import completed, preset
from ..rotary import Rotary
from . import configuration
from .attention import Model, check_model, use_sparse_attention
from .configuration import CONVERTED_KEY, NAME, REPLACED, NSAModelConfig, layer_config
from .modeling import NSAAttention

# modules that `convert` can read; those with `qkv_proj` have one projection of q, k and v, those
# with `q_norm` norms of every head of queries and keys
FAMILIES = [
    f"{name}Attention"
    for name in (
        "Gemma", "Gemma2", "Gemma3", "Granite", "Llama", "Mistral", "Mixtral", "Phi", "Phi3",
        "Qwen2", "Qwen2Moe", "Qwen3", "Qwen3Moe", "SmolLM3",
    )
]  # fmt: skip

# all settings but those that the model decides, or that have one form
FIXED = {"scale", "soft_cap", "attention_sinks", "compress_mlp_expand_factor"}
SETTINGS = {name: value for name, value in configuration.SETTINGS.items() if name not in FIXED}
# tokens rank blocks by learned queries and keys
ONE_SOFTMAX: dict[str, Any] = preset("one-softmax", user_settings=dict(importance="index"))
BRANCHES = preset("paper", None, dict(branch_kv="shared", sliding_window_size=512))


def convert(
    model: Model, config: NSAConfig | Mapping[str, Any] | None = None, **settings: Any
) -> Model:
    """Replace the full attention of a trained decoder by `SparseAttention` layers with its weights,
    in place, and return it.

    With `branches=("selected",)`, the default, the model is dense attention up to the length that
    its blocks or `dense_length` cover. With more branches a gate begins open for one branch, the
    window (without one the selected branch), and closed for the others: while that branch covers
    the sequence, the outputs are those of the model.

    Args:
        model: a loaded decoder with attention of `FAMILIES`.
        config: an `NSAConfig` or a dict of its settings. Without config and settings, those that
            `model.config.nsa_converted` keeps.
        settings: single settings of `NSAConfig`, which replace those of `config`. The model decides
            dim, dim_head, heads, kv_heads, causal, norm, the biases, qk_norm, scale and soft_cap.
            `index_heads` is kv_heads by default. Windows are compressed by their mean. `gate_bias`
            (12) is the first logit of open gates; closed ones have its negative. `share_ranking`
            lists the layers that rank for those after them, as in `Transformer`.
    """
    decoder = check_model(model)
    if config is None and not settings:
        config = getattr(decoder.config, CONVERTED_KEY, None)
    if isinstance(config, Mapping):
        settings, config = {**config, **settings}, None
    # logits of open gates; sigmoid(12) = 1 - 6e-6
    bias = check_factor("gate_bias", settings.pop("gate_bias", 12.0))
    share_ranking = settings.pop("share_ranking", None)
    base, kinds = decoder.base_model, getattr(decoder.config, "layer_types", None)
    layers: dict[int, Any] = {
        index: layer
        for index, layer in enumerate(getattr(base, "layers", []))
        if kinds is None or kinds[index] == "full_attention"
    }
    rotary = getattr(base, "rotary_emb", None)
    if not layers or rotary is None:
        raise ValueError(f"model must have layers and rotary_emb, got a {type(base).__name__}")
    if torch.get_default_device().type == "meta":  # within `from_pretrained`
        with torch.device("cpu"):  # frequencies with values
            rotary = type(rotary)(decoder.config)
    sources = check_share_ranking(share_ranking, [*layers], len(base.layers))
    converted = {}
    for index, layer in layers.items():
        module, source = getattr(layer, "self_attn", layer), sources.get(index)
        ranking = {} if source in (None, index) else GIVEN
        attention = sparse_layer(module, rotary, config, settings | ranking, bias)
        wrapped = NSAAttention(attention, index, module.attention_dropout, source)
        converted[index] = wrapped.train(module.training)
    kept = check_ranks(converted[min(converted)].attention.config)
    for index, wrapped in converted.items():  # the model changes once all layers are made
        layers[index].self_attn = wrapped
    saved = kept.values_of(*SETTINGS) | dict(gate_bias=bias)
    saved |= dict(share_ranking=[int(i) for i in share_ranking]) if share_ranking else {}
    setattr(decoder.config, CONVERTED_KEY, saved)
    # of its file: ConvertedLoader loads it, and without this import transformers refuses "nsa"
    vars(decoder.config).setdefault("quantization_config", dict(quant_method=configuration.LOADER))
    decoder.config.attn_implementation = NAME
    decoder.set_attn_implementation(NAME)
    return model


def sparse_layer(
    module: Any, rotary: Any, user: NSAConfig | None, user_settings: Mapping[str, Any],
    gate_bias: float,
) -> SparseAttention:  # fmt: skip
    """A layer with the weights of an attention module, frozen where its weights are."""
    name = type(module).__name__
    if name not in FAMILIES:
        expected = f"attention of {', '.join(FAMILIES)}"
        raise ValueError(f"model must have {expected}, got {name}: use_sparse_attention takes more")
    # rotary frequencies [pairs] of the first 2 pairs features; none without positions
    D, inv_freq, amplitude, pairs, rope_type = module.head_dim, None, 1.0, 0, "default"
    if getattr(module, "use_rope", True):
        rope_type = getattr(rotary, "rope_type", rope_type)
        rope_type = rope_type["full_attention"] if isinstance(rope_type, dict) else rope_type
        prefix = "full_attention_" if hasattr(rotary, "full_attention_inv_freq") else ""
        inv_freq = getattr(rotary, f"{prefix}inv_freq").detach().float()
        amplitude = float(getattr(rotary, f"{prefix}attention_scaling", 1.0))
        pairs = len(inv_freq)
    inputs = ["qkv_proj"] if hasattr(module, "qkv_proj") else ["q_proj", "k_proj", "v_proj"]
    out = module.dense if hasattr(module, "dense") else module.o_proj
    linears = [getattr(module, n) for n in inputs]
    problem, is_loading = None, torch.get_default_device().type == "meta"
    if getattr(module, "qk_layernorm", False):
        problem = "RMSNorm of queries and keys or none, got one with LayerNorm (qk_layernorm)"
    elif rope_type in ("dynamic", "longrope"):
        problem = f"frequencies that no length changes, got one with rope_type={rope_type!r}"
    elif amplitude != 1.0 and 2 * pairs < D:
        problem = f"attention_scaling 1 where a part of a head is rotated, got {amplitude}"
    elif any(
        type(linear) is not nn.Linear
        or not linear.weight.is_floating_point()
        or (linear.weight.is_meta and not is_loading)  # offloaded
        or hasattr(linear.weight, "device_mesh")
        for linear in (*linears, out)
    ):
        problem = "projections that are nn.Linear with whole, loaded weights, without adapters"
    if problem:
        raise ValueError(f"model must have {problem} ({name})")

    # pairs of neighbours, of features i and i + pairs, which transformers rotates together
    order = torch.arange(D)
    order = torch.cat((order[: 2 * pairs].view(2, pairs).T.flatten(), order[2 * pairs :]))

    def pair(t: Tensor) -> Tensor:
        return t.unflatten(0, (-1, D))[:, order.to(t.device)].flatten(0, 1)

    H, K = module.config.num_attention_heads, module.config.num_key_value_heads
    projections, norms, scales, eps = {}, [], [], 1e-6
    for part in ("weight", "bias"):
        if getattr(linears[0], part) is not None:
            qkv = torch.cat([getattr(linear, part).detach() for linear in linears])
            q, k, v = qkv.split([H * D, K * D, K * D])
            projections[part] = [pair(q), pair(k), v]
    if hasattr(module, "q_norm"):
        eps = getattr(module.q_norm, "variance_epsilon", getattr(module.q_norm, "eps", eps))
        plus = name.startswith("Gemma")
        norms = [module.q_norm, module.k_norm]
        scales = [pair(norm.weight.detach()) + plus for norm in norms]
    decided: dict[str, Any] = dict(
        dim=out.weight.shape[0], dim_head=D, heads=H, kv_heads=K, causal=True, norm=False,
        qkv_bias="bias" in projections, out_bias=out.bias is not None, qk_norm=bool(norms),
        qk_norm_eps=eps, attention_sinks=False, compress_mlp_expand_factor=1.0, block_sizes=None,
        scale=float(module.scaling) * amplitude**2,  # of queries and of keys
        soft_cap=module.attn_logit_softcapping if name == "Gemma2Attention" else None,
    )  # fmt: skip

    branches = user_settings.get("branches", getattr(user, "branches", ("selected",)))
    is_alone = check_branches(branches) == ("selected",)
    defaults = SETTINGS | (ONE_SOFTMAX if is_alone else BRANCHES) | dict(index_heads=K)
    config = layer_config(user, user_settings, defaults, decided)
    first = "window" if "window" in config.branches else "selected"
    if first not in config.branches:
        raise ValueError(f"branches must hold 'selected' or 'window', got {config.branches}")
    networks: dict[str, Any] = dict(rotary_emb=False)
    if inv_freq is not None:
        networks = dict(inv_freq=inv_freq.cpu())
    if "compressed" in config.branches:
        networks["compress_mlp"] = MeanPool()
    if len(config.branches) > 1:
        begin = tuple(gate_bias if branch == first else -gate_bias for branch in config.branches)
        networks["strategy_combine_mlp"] = gate_linear(config.dim, H, begin)
    layer = SparseAttention.from_config(config, **networks).to(out.weight.device, out.weight.dtype)
    kv_sets = 1 if config.branch_kv == "shared" else len(config.branches)
    for part, (q, k, v) in projections.items():
        assign(getattr(layer.to_qkv, part), torch.cat([q, *(k, v) * kv_sets]))
    layer.to_qkv.requires_grad_(any(linear.weight.requires_grad for linear in linears))
    layer.combine_heads.load_state_dict(out.state_dict())
    layer.combine_heads.requires_grad_(out.weight.requires_grad)
    copies: Any = (layer.q_norm, layer.k_norm)
    for copy, norm, scale in zip(copies, norms, scales, strict=False):
        assign(copy.weight, scale)
        copy.requires_grad_(norm.weight.requires_grad)
    if layer.to_index is not None and config.index_dim == D:
        # the mean query of each group, and the mean key of its KV heads, without biases and norms:
        # where the model has neither, the score of a block is a logit of the mean query
        means = []
        for index, heads in enumerate((K, config.index_heads)):
            weight = projections["weight"][index].unflatten(0, (-1, D))
            weight = weight * scales[index][:, None] if scales else weight
            means.append(reduce(weight, "(h g) d i -> (h d) i", "mean", h=heads))
        scale = config.scale_of(D) * D**0.5  # scores have the index's own scale
        assign(layer.to_index.weight, torch.cat((means[0] * scale, means[1])))
    return layer


register_quantization_config(configuration.LOADER)(QuantizationConfigMixin)


@register_quantizer(configuration.LOADER)
class ConvertedLoader(HfQuantizer):
    """Lets `from_pretrained` load a converted model. Nothing is quantized: a quantizer is what
    transformers calls to replace modules before their weights load."""

    is_trainable = True

    def is_serializable(self) -> bool:
        return True

    def _process_model_before_weight_loading(self, model: Any, **options: Any) -> None:
        convert(model.get_decoder())
        self.pre_quantized = False  # weights are cast as any others
        self.shapes = {name: t.shape for name, t in model.state_dict().items()}

    def _process_model_after_weight_loading(self, model: Any, **options: Any) -> None:
        # before 5.24 weights of other shapes take the place of those of a quantizer
        check_weights({n for n, t in model.state_dict().items() if t.shape != self.shapes[n]})
        for module in model.modules():
            if isinstance(module, Rotary):  # whose frequencies have come in the model's dtype
                module.reset_parameters()
        model.hf_quantizer, model.is_quantized = None, False


def check_weights(wrong: set[str]) -> None:
    if wrong:
        raise refusal("settings", "those of the saved weights", got=f"others for {min(wrong)}")


@contextmanager
def quiet(path: Path) -> Iterator[None]:
    """Keep notes and progress bars of transformers from the terminal. Errors of the libraries that
    read files become a ValueError with the path."""
    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    except (ValueError, ImportError):
        raise
    except Exception as error:
        reason = " ".join(str(error).split())[:200]
        raise ValueError(f"{path} cannot be loaded: {reason}") from None
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()


def load_converted(path: str | Path, **settings: Any) -> nn.Module:
    """A converted model from the folder that its `save_pretrained` wrote, in inference mode: as by
    `from_pretrained`, also with other settings, and of an earlier version.

    Args:
        path: a folder.
        settings: settings that replace the kept ones, of those that change no weights.
    """
    folder = Path(path) if isinstance(path, (str, Path)) else None
    if folder is None or not (folder / "config.json").is_file():
        raise refusal("path", "a folder with config.json", path)
    config = transformers.AutoConfig.from_pretrained(folder)
    text = config.get_text_config(decoder=True)
    if not (saved := getattr(text, CONVERTED_KEY, None)):
        raise refusal("path", "a folder of a converted model", got=f"{path}")
    setattr(text, CONVERTED_KEY, completed(saved, settings))
    vars(text).setdefault("quantization_config", dict(quant_method=configuration.LOADER))
    name, *_ = config.architectures or ("none",)
    if (architecture := getattr(transformers, name, None)) is None:
        got = f"a model of class {name}: call its from_pretrained"
        raise refusal("path", "a folder of a model of transformers", got=got)
    with quiet(folder):
        model, report = architecture.from_pretrained(
            folder, config=config, dtype="auto", attn_implementation=NAME,
            ignore_mismatched_sizes=True, output_loading_info=True,
        )  # fmt: skip
    wrong = {*report["missing_keys"], *(name for name, *_ in report["mismatched_keys"])}
    wrong |= {name for name in report["unexpected_keys"] if ".self_attn.attention." in name}
    check_weights(wrong)
    return model


def load_viewed(
    path: Path, settings: Mapping[str, Any] | None, device: torch.device
) -> tuple[nn.Module, Any]:
    """A model whose layers are `SparseAttention`, in inference mode, and its tokenizer, of a folder
    or a GGUF file. On the CPU weights are fp32, elsewhere of the dtype of the file.

    An `NSAForCausalLM` and a converted model are loaded as they are. `convert` gives another
    decoder layers of the same numbers as under `use_sparse_attention`. `settings` replace those
    that the configuration keeps; those of a converted model must not change weights."""
    is_gguf, dtype = path.suffix == ".gguf", torch.float32 if device.type == "cpu" else None
    # nothing is downloaded, and no code of a folder runs
    source: dict[str, Any] = dict(local_files_only=True, trust_remote_code=False)
    source["pretrained_model_name_or_path"] = path.parent if is_gguf else path
    source |= dict(gguf_file=path.name) if is_gguf else {}
    config = transformers.AutoConfig.from_pretrained(**source)
    if type(config) not in transformers.MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ValueError(f"{path} must hold a decoder, got model_type={config.model_type!r}")
    is_converted = bool(getattr(config.get_text_config(decoder=True), CONVERTED_KEY, None))
    is_native = isinstance(config, NSAModelConfig)
    if is_native and settings is not None:
        expected = "None for a model of type 'nsa', whose config.json has its own"
        raise refusal("settings", expected, dict(settings))
    # without files some kinds of tokenizers begin with an empty vocabulary
    names = ("tokenizer_config.json", "tokenizer.json", "tokenizer.model", "vocab.*")
    if not is_gguf and not any(file for name in names for file in path.glob(name)):
        raise ValueError(f"{path} must hold a tokenizer, as tokenizer.save_pretrained writes it")
    tokenizer = transformers.AutoTokenizer.from_pretrained(**source)
    if is_converted:
        return load_converted(path, **(settings or {})).to(device, dtype), tokenizer
    model, report = transformers.AutoModelForCausalLM.from_pretrained(
        **source, dtype=dtype or "auto", output_loading_info=True,
        quantization_config=transformers.GgufConfig(dequantize=True) if is_gguf else None,
        ignore_mismatched_sizes=True,
    )  # fmt: skip
    absent = {*report["missing_keys"], *(name for name, *_ in report["mismatched_keys"])}
    # what the head predicts is not seen
    if absent := {name for name in absent if not name.startswith("lm_head.")}:
        raise ValueError(f"{path} must hold all weights, got none of the size of {min(absent)}")
    if not is_native:  # settings and numbers as of the drop-in
        use_sparse_attention(model, settings)
        kept = {n: v for n, v in model.config.nsa_config.items() if n != REPLACED}
        convert(model, kept)
    return model.to(device), tokenizer
