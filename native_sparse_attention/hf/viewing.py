"""Models of files, with layers that `view` records: the `.view` command reads them by this."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
)

from ..checks import describe
from .configuration import (
    CONVERTED_KEY,
    DEFAULTS,
    FIXED,
    KEY,
    REPLACED,
    NSAModelConfig,
    kept_settings,
    layer_config,
)
from .convert import convert, load_converted, quiet


def load_viewed(
    path: str | Path, settings: Mapping[str, Any] | None = None, device: torch.device | str = "cpu"
) -> tuple[nn.Module, Any]:
    """A model whose layers are `SparseAttention`, in inference mode, and its tokenizer.

    An `NSAForCausalLM` and a converted model are loaded as they are. Another decoder attends as
    under `use_sparse_attention`: `convert` gives it layers of the same numbers.

    `path` is a folder or a GGUF file. `settings` are those of `use_sparse_attention`, instead of
    those that the configuration keeps, or of a converted model if they change no weights. On the
    CPU weights are fp32, elsewhere of the dtype of the file."""
    try:
        with quiet():
            model, tokenizer = load(Path(path), settings, torch.device(device).type == "cpu")
    except (ValueError, ImportError, MemoryError):
        raise
    except Exception as error:  # of the libraries that read a file
        if isinstance(error, RuntimeError) and "memory" in str(error):
            raise
        reason = " ".join(str(error).split())[:200]
        raise ValueError(f"{path} cannot be loaded: {reason}") from None
    return model.to(device).eval(), tokenizer


def load(path: Path, settings: Mapping[str, Any] | None, is_cpu: bool) -> tuple[Any, Any]:
    """`load_viewed`, with errors of the libraries."""
    is_gguf, options = path.suffix == ".gguf", {}
    # nothing is downloaded, and no code of a folder runs
    source: dict[str, Any] = dict(local_files_only=True, trust_remote_code=False)
    source["pretrained_model_name_or_path"] = str(path.parent if is_gguf else path)
    if is_gguf:
        source["gguf_file"] = path.name
        if unpack := getattr(transformers, "GgufConfig", None):
            # some releases keep the weights packed on a GPU
            options["quantization_config"] = unpack(dequantize=True)
    config = AutoConfig.from_pretrained(**source)
    is_converted = bool(getattr(config.get_text_config(decoder=True), CONVERTED_KEY, None))
    is_native, values = isinstance(config, NSAModelConfig), None
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ValueError(f"{path} must hold a decoder, got model_type={config.model_type!r}")
    if settings is not None and is_native:
        raise ValueError(
            "settings must be None for a model of type 'nsa', whose config.json has its own, got "
            f"{describe(dict(settings))}"
        )
    if not is_converted and not is_native:
        user = dict((getattr(config, KEY, None) or {}) if settings is None else settings)
        user.pop(REPLACED, None)
        values = kept_settings(layer_config(user, {}, DEFAULTS, FIXED), DEFAULTS)
    # without files some kinds of tokenizers begin with an empty vocabulary
    names = ("tokenizer_config.json", "tokenizer.json", "tokenizer.model", "vocab.*")
    if not is_gguf and not any(file for name in names for file in path.glob(name)):
        raise ValueError(f"{path} must hold a tokenizer, as tokenizer.save_pretrained writes it")
    tokenizer = AutoTokenizer.from_pretrained(**source)
    if is_converted:
        model = load_converted(path, **(settings or {}))
        return model.float() if is_cpu else model, tokenizer
    model, report = AutoModelForCausalLM.from_pretrained(
        **source, **options, dtype=torch.float32 if is_cpu else "auto", output_loading_info=True,
        ignore_mismatched_sizes=True,
    )  # fmt: skip
    absent = {*report["missing_keys"], *(name for name, *_ in report["mismatched_keys"])}
    # what the head predicts is not seen
    if absent := {name for name in absent if not name.startswith("lm_head.")}:
        raise ValueError(
            f"{path} must hold all weights of the model, got none of the size of {min(absent)}"
        )
    return model if values is None else convert(model, values), tokenizer
