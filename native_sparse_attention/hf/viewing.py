"""Models of files, with layers that `view` records: the `.view` command reads them by this."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
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

from ..checks.scalars import shown
from .configuration import (
    CONVERTED_KEY,
    DEFAULTS,
    FIXED,
    KEY,
    REPLACED,
    NSAModelConfig,
    layer_config,
)
from .convert import convert, load_converted, quiet


def load_viewed(
    path: str | Path,
    settings: Mapping[str, Any] | None = None,
    device: torch.device | str = "cpu",
) -> tuple[nn.Module, Any]:
    """A model whose layers are `SparseAttention`, in inference mode, and its tokenizer.

    An `NSAForCausalLM` and a converted model are loaded as they are. Another decoder attends as
    under `use_sparse_attention`: `convert` gives it layers of the same numbers.

    Args:
        path: a folder with config.json, or a GGUF file.
        settings: of `use_sparse_attention`, instead of those that the configuration keeps; or
            settings of a converted model that change no weights.
        device: of the weights, which have the dtype of the file; on the CPU fp32.

    Raises:
        ValueError: a model that cannot be loaded or converted, or has no tokenizer.
        ImportError: a package that a file needs is not installed.
    """
    path, is_gguf = Path(path), Path(path).suffix == ".gguf"
    # nothing is downloaded, and no code of a folder runs
    source: dict[str, Any] = dict(local_files_only=True, trust_remote_code=False)
    source["pretrained_model_name_or_path"] = str(path.parent if is_gguf else path)
    options: dict[str, Any] = {}
    if is_gguf:
        if missing := [name for name in ("gguf", "accelerate") if find_spec(name) is None]:
            names = " and ".join(missing)
            raise ImportError(f"{path} needs {names}: pip install {' '.join(missing)}")
        source["gguf_file"] = path.name
        if unpack := getattr(transformers, "GgufConfig", None):
            # some releases keep the weights packed on a GPU
            options["quantization_config"] = unpack(dequantize=True)
    try:
        with quiet():
            model, tokenizer = load(path, source, options, settings, device)
    except (ValueError, ImportError, MemoryError):
        raise
    except Exception as error:  # of the libraries that read a file
        if isinstance(error, RuntimeError) and "memory" in str(error):
            raise
        raise ValueError(f"{path} cannot be loaded: {one_line(error)}") from None
    return model.to(device).eval(), tokenizer


def one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:200]


def load(path: Path, source: Any, options: Any, settings: Any, device: Any) -> tuple[Any, Any]:
    """`load_viewed`, with errors of the libraries."""
    config = AutoConfig.from_pretrained(**source)
    is_converted = bool(getattr(config.get_text_config(decoder=True), CONVERTED_KEY, None))
    is_native, values = isinstance(config, NSAModelConfig), None
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ValueError(f"{path} must hold a decoder, got model_type={config.model_type!r}")
    if settings is not None and is_native:
        raise ValueError(
            "settings must be None for a model of type 'nsa', whose config.json has its own, got "
            f"{shown(dict(settings))}"
        )
    if not is_converted and not is_native:
        user = dict((getattr(config, KEY, None) or {}) if settings is None else settings)
        user.pop(REPLACED, None)
        checked = layer_config(user, {}, DEFAULTS, FIXED)
        values = {name: getattr(checked, name) for name in DEFAULTS}
    tokenizer = load_tokenizer(path, source)
    dtype: Any = torch.float32 if torch.device(device).type == "cpu" else "auto"
    if is_converted:
        model = load_converted(path, **(settings or {}))
        return model.float() if dtype == torch.float32 else model, tokenizer
    model, report = AutoModelForCausalLM.from_pretrained(
        **source, **options, dtype=dtype, output_loading_info=True, ignore_mismatched_sizes=True
    )
    absent = {*report["missing_keys"], *(name for name, *_ in report["mismatched_keys"])}
    # what the head predicts is not seen
    if absent := {name for name in absent if not name.startswith("lm_head.")}:
        raise ValueError(
            f"{path} must hold all weights of the model, got none of the size of {min(absent)}"
        )
    return model if values is None else convert(model, values), tokenizer


def load_tokenizer(path: Path, source: Mapping[str, Any]) -> Any:
    tokenizer, reason = None, "no file of one"
    try:
        tokenizer = AutoTokenizer.from_pretrained(**source)
    except Exception as error:  # each kind of tokenizer has errors of its own
        reason = one_line(error)
    if tokenizer is not None:
        # without files some kinds begin with an empty vocabulary
        names = {"tokenizer_config.json", "tokenizer.json", *tokenizer.vocab_files_names.values()}
        if "gguf_file" in source or any((path / name).is_file() for name in names):
            return tokenizer
    raise ValueError(
        f"{path} must hold a tokenizer, as tokenizer.save_pretrained writes it, got {reason}"
    )
