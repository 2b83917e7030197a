"""Compile the kernels of a layer before its first call."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .attention import SparseAttention
from .checks import check_bools, check_choice, check_device, check_int, check_type, refusal
from .compress import MeanPool
from .config import NSAConfig

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def warmup(
    config: NSAConfig,
    dtype: torch.dtype = torch.bfloat16,
    *,
    lengths: Sequence[int] = (1000, 2048, 8192, 16384),
    device: torch.device | str | None = None,
    training: bool = True,
    documents: bool = False,
) -> int:
    """Compile the Triton kernels of a `SparseAttention` with these settings in parallel, into this
    process and Triton's cache on disk. Otherwise the first call of a layer compiles them.

    The kernels depend on the settings, the dtype, the GPU and the range of the length, but not on
    the batch or on the positions of documents.

    Args:
        config: the settings of the layer.
        dtype: dtype of the layer's input; under autocast, autocast's dtype.
        lengths: tokens per call, one number per range; the defaults have one of each. Each length
            needs the memory of one layer's forward and backward.
        device: a CUDA device; the current one by default.
        training: compile the backward too.
        documents: compile the kernels for packed documents.

    Returns:
        How many kernels were compiled, or loaded from Triton's cache on disk. 0 if the layer runs
        no kernels (without CUDA, or with another backend) or Triton cannot compile ahead (before
        3.6).
    """
    check_type("config", config, NSAConfig, "an NSAConfig")
    check_choice("dtype", dtype, DTYPES)
    if isinstance(lengths, (str, bytes)) or not isinstance(lengths, Sequence):
        raise refusal("lengths", "a sequence of integers", lengths)
    lengths = [check_int("lengths", length, 1) for length in lengths]
    training, documents = check_bools(training=training, documents=documents)
    device = check_device("device", "cuda" if device is None else device)
    if device.type != "cuda":
        raise refusal("device", "a CUDA device", device)
    if not torch.cuda.is_available() or config.backend not in ("auto", "triton"):
        return 0
    from .kernels.common.precompile import compile_ahead

    # compression networks run no kernels of this library
    network = None if config.is_indexed else MeanPool()
    layer = SparseAttention.from_config(config, compress_mlp=network).to(device, dtype)

    def dry_run() -> None:
        # run the backward in this thread, too: this thread launches nothing
        with torch.autograd.set_multithreading_enabled(False), torch.set_grad_enabled(training):
            for length in lengths:
                x = torch.zeros(1, length, config.dim, dtype=dtype, device=device)
                x.requires_grad_(training)
                offsets = torch.tensor([0, length // 2, length], device=device)
                for cu_seqlens in (None, offsets) if documents else (None,):
                    indices = None
                    if config.takes_blocks:
                        slots = 1, length, 1, config.num_selected_blocks
                        indices = torch.zeros(slots, dtype=torch.int32, device=device)
                    out = layer(x, cu_seqlens=cu_seqlens, block_indices=indices)
                    if training:
                        out.backward(torch.zeros_like(out))
                    del out

    return compile_ahead(dry_run)
