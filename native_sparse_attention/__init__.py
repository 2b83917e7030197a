"""Native Sparse Attention (arXiv 2502.11089) for PyTorch.

In all modules an argument of another type, shape or range than described, or at odds with others,
is a ValueError that names it, and a call that an explicit backend lacks a NotImplementedError.
"""

from importlib import metadata

from . import recipes
from .attention import SparseAttention
from .block_sizes import BlockSizes
from .cache.kv_cache import KVCache
from .cache.paged import PagedKVCache
from .config import NSAConfig
from .cost import nsa_cost
from .dense import (
    SegmentIds,
    below_or_on_diag,
    block_masked_attention,
    chunked_attention,
    mask_blocker,
    mha_reference,
    mha_reference_bwd,
    mha_reference_no_custom_vjp,
)
from .ops.branches import DenseAttentionWarning
from .ops.decode import decode_attention, pack_keys
from .ops.functional import (
    compressed_attention,
    native_sparse_attention,
    select_blocks,
    selected_attention,
    sliding_window_attention,
)
from .precompile import warmup
from .transformer import Transformer
from .view.collector import collect

try:
    __version__ = metadata.version("native-sparse-attention")
except metadata.PackageNotFoundError:  # sources on the path, not installed
    __version__ = "0+unknown"

__all__ = [
    "BlockSizes",
    "DenseAttentionWarning",
    "KVCache",
    "NSAConfig",
    "PagedKVCache",
    "SegmentIds",
    "SparseAttention",
    "Transformer",
    "below_or_on_diag",
    "block_masked_attention",
    "chunked_attention",
    "collect",
    "compressed_attention",
    "decode_attention",
    "mask_blocker",
    "mha_reference",
    "mha_reference_bwd",
    "mha_reference_no_custom_vjp",
    "native_sparse_attention",
    "nsa_cost",
    "pack_keys",
    "recipes",
    "select_blocks",
    "selected_attention",
    "sliding_window_attention",
    "warmup",
]
