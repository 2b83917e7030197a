"""Models of files, with layers that `view` records: the `.view` command reads them by this."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
)

from ..checks.scalars import shown
from .configuration import NSAModelConfig
from .convert import convert, load_converted
from .settings import CONVERTED_KEY, KEY, drop_in_settings, without_notes

# nothing is downloaded, and no code of a folder runs
LOCAL: dict[str, Any] = dict(local_files_only=True, trust_remote_code=False)


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
    path = Path(path)
    source = source_of(path)
    with without_notes():
        config = config_of(path, source)
        if settings is not None and isinstance(config, NSAModelConfig):
            raise ValueError(
                f"settings must be None for a model of type 'nsa', whose config.json has its own, "
                f"got {shown(dict(settings))}"
            )
        kept = getattr(config.get_text_config(decoder=True), CONVERTED_KEY, None)
        values = None
        if not kept and not isinstance(config, NSAModelConfig):
            user = getattr(config, KEY, None) if settings is None else settings
            values = drop_in_settings(user, {})
        tokenizer = tokenizer_of(path, source)
        dtype = torch.float32 if torch.device(device).type == "cpu" else "auto"
        with errors_of(path):
            if kept:
                model: Any = load_converted(path, **(settings or {}))
                model = model.float() if dtype == torch.float32 else model
            else:
                model = loaded(path, source, dtype)
        if values is not None:
            convert(model, values)
    return model.to(device).eval(), tokenizer


def source_of(path: Path) -> dict[str, Any]:
    """Where `from_pretrained` finds the files."""
    if path.suffix != ".gguf":
        return dict(pretrained_model_name_or_path=str(path), **LOCAL)
    if missing := [name for name in ("gguf", "accelerate") if find_spec(name) is None]:
        raise ImportError(f"{path} needs {' and '.join(missing)}: pip install {' '.join(missing)}")
    return dict(pretrained_model_name_or_path=str(path.parent), gguf_file=path.name, **LOCAL)


def config_of(path: Path, source: Mapping[str, Any]) -> Any:
    """The configuration of a decoder that this release of transformers knows."""
    if "gguf_file" not in source:
        name = json.loads((path / "config.json").read_text(encoding="utf-8")).get("model_type")
        if name not in CONFIG_MAPPING:
            raise ValueError(
                f"{path} must hold a model that transformers {transformers.__version__} knows, got "
                f"model_type={name!r}"
            )
    with errors_of(path):
        config = AutoConfig.from_pretrained(**source)
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ValueError(f"{path} must hold a decoder, got model_type={config.model_type!r}")
    return config


def tokenizer_of(path: Path, source: Mapping[str, Any]) -> Any:
    tokenizer, reason = None, "no file of one"
    try:
        tokenizer = AutoTokenizer.from_pretrained(**source)
    except Exception as error:  # each kind of tokenizer has errors of its own
        reason = " ".join(str(error).split())[:200]
    if tokenizer is not None:
        # without files some kinds begin with an empty vocabulary
        names = {"tokenizer_config.json", "tokenizer.json", *tokenizer.vocab_files_names.values()}
        if "gguf_file" in source or any((path / name).is_file() for name in names):
            return tokenizer
    raise ValueError(
        f"{path} must hold a tokenizer, as tokenizer.save_pretrained writes it, got {reason}"
    )


def loaded(path: Path, source: Mapping[str, Any], dtype: Any) -> Any:
    """The model with its dense attention, every weight of it from the file."""
    options = dict(source, dtype=dtype)
    widened = getattr(transformers, "GgufConfig", None)
    if "gguf_file" in source and widened is not None:
        # some releases keep the weights packed on a GPU
        options["quantization_config"] = widened(dequantize=True)
    model, report = AutoModelForCausalLM.from_pretrained(
        **options, output_loading_info=True, ignore_mismatched_sizes=True
    )
    absent = [*report["missing_keys"], *(name for name, *_ in report["mismatched_keys"])]
    # what the head predicts is not seen
    if absent := sorted(name for name in absent if not name.startswith("lm_head.")):
        raise ValueError(
            f"{path} must hold all weights of the model, got none of the size of {absent[0]}"
        )
    return model


@contextmanager
def errors_of(path: Path) -> Iterator[None]:
    """Let errors of the libraries that read a file name it, as a ValueError."""
    try:
        yield
    except (ValueError, ImportError, MemoryError):
        raise
    except Exception as error:
        if isinstance(error, RuntimeError) and "memory" in str(error):
            raise
        reason = " ".join(str(error).split())[:200]
        raise ValueError(f"{path} cannot be loaded: {reason}") from None
