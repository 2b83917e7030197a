"""Sparse attention for trained models of transformers: `use_sparse_attention(model)`, with the
model's own weights; `convert(model)`, to layers of this library, and `distill`, to train them;
`NSAForCausalLM`, a model of its own.

The import registers "nsa" as an attention implementation of transformers, for `from_pretrained(...,
attn_implementation="nsa")`, and as a type of model, for the Auto classes, and what loads converted
models (docs/huggingface.md).
"""

try:
    from transformers.utils.versions import require_version

    require_version("transformers>=5.17")  # that of the extra hf
except ImportError as error:
    raise ImportError(f"native_sparse_attention.hf needs pip install -e '.[hf]': {error}") from None

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
