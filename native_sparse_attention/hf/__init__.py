"""Sparse attention for trained models of transformers: `use_sparse_attention(model)`, with the
model's own weights; `convert(model)`, to layers of this library, and `distill`, to train them;
`NSAForCausalLM`, a model of its own.

The import registers "nsa" as an attention implementation of transformers, for `from_pretrained(...,
attn_implementation="nsa")`, and as a type of model, for the Auto classes (docs/huggingface.md).
"""

import re
from importlib import metadata

try:
    installed = metadata.version("transformers")
except metadata.PackageNotFoundError:
    installed = "none"
# that of the extra hf
if [int(part) for part in re.findall(r"\d+", installed)[:2]] < [5, 17]:
    raise ImportError(
        f"native_sparse_attention.hf needs transformers 5.17 or later, got {installed}: "
        "pip install 'native-sparse-attention[hf]'"
    )

from .attention import use_dense_attention, use_sparse_attention
from .cache import SparseCache, StaticSparseCache
from .configuration import NSAModelConfig
from .convert import convert, load_converted
from .distill import distill
from .modeling import NSAForCausalLM, NSAModel, NSAPreTrainedModel, ranking_losses

__all__ = [
    "NSAForCausalLM",
    "NSAModel",
    "NSAModelConfig",
    "NSAPreTrainedModel",
    "SparseCache",
    "StaticSparseCache",
    "convert",
    "distill",
    "load_converted",
    "ranking_losses",
    "use_dense_attention",
    "use_sparse_attention",
]
