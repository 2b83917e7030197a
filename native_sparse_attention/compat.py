"""Compatibility with torch.compile, torch.export, torch.func, autocast and SDPA."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor
from torch.autograd import forward_ad

# fixed here, since dynamo cannot trace the query of torch.amp in every version
WITHOUT_AUTOCAST = ("meta",)

# in these versions dynamo evaluates `torch.compiler.is_exporting` to True in every graph
ALWAYS_EXPORTING = torch.__version__.startswith(("2.8.", "2.9.", "2.10.", "2.11."))

# einops registers a type at its first use. If that happened in a traced graph, the graph's guard on
# the registry would fail at the next call, and torch would compile again.
for sample in (torch.empty(0), torch.nn.Parameter(torch.empty(0))):
    rearrange(sample, "n -> n")
del sample


def no_autocast(device: str) -> AbstractContextManager[object]:
    """Disable autocast on a device type, such as "cuda"."""
    if device in WITHOUT_AUTOCAST:
        return nullcontext()
    return torch.autocast(device, enabled=False)


def cast_to_autocast_dtype(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Cast tensors as autocast casts a matmul's inputs: all but fp64 to its dtype."""
    device = tensors[0].device.type
    if device in WITHOUT_AUTOCAST or not torch.is_autocast_enabled(device):
        return tensors
    dtype = torch.get_autocast_dtype(device)
    return tuple(t if t.dtype == torch.float64 else t.to(dtype) for t in tensors)


def is_exporting() -> bool:
    """`torch.compiler.is_exporting`, also correct in compiled graphs of torch before 2.12."""
    if ALWAYS_EXPORTING and torch.compiler.is_dynamo_compiling():
        return torch.compiler._is_exporting_flag
    return torch.compiler.is_exporting()


def free_size(size: int) -> int:
    """A size that depends on a sequence length, without guards under torch.export: where axes merge
    it must prove facts about sizes such as `length // 8`, which it cannot for every length. A free
    size is computed at run time. Outside of torch.export it is the size itself."""
    if not is_exporting():
        return size
    if isinstance(size, int) and not torch.compiler.is_dynamo_compiling():
        return size  # the length is fixed
    free: int = torch.full((), size, dtype=torch.int64, device="cpu").item()  # type: ignore[assignment]
    torch._check(free >= 0)
    return free


def sdpa(
    q: Tensor, k: Tensor, v: Tensor, *, scale: float | None = None, **settings: Any
) -> Tensor:  # fmt: skip
    """`F.scaled_dot_product_attention`; a single query [.. 1 D] on a GPU never runs in cuDNN.

    Torch multiplies masked logits, -inf, by the scale: with one of 0 or below rows become NaN. Such
    a scale multiplies the queries instead.

    cuDNN plans each number of keys anew. In a model of 8 layers whose cache grows, a step takes 50
    to 80 ms so on an H100, and 8 to 11 with the other backends. Compiled graphs keep torch's
    choice. Other threads' calls may miss cuDNN while one runs: torch has one switch for all.
    """
    attend = F.scaled_dot_product_attention
    if scale is not None and scale <= 0:
        q, scale = (-q, -scale) if scale else (q * 0, 1.0)
    settings["scale"] = scale
    if torch.compiler.is_compiling() or not q.is_cuda or q.shape[-2] != 1:
        return attend(q, k, v, **settings)
    cuda = torch.backends.cuda
    was_enabled = cuda.cudnn_sdp_enabled()
    # `sdpa_kernel` does the same in 30 us
    cuda.enable_cudnn_sdp(False)
    try:
        return attend(q, k, v, **settings)
    finally:
        cuda.enable_cudnn_sdp(was_enabled)


def refuse_context_parallel(op: str) -> None:
    """Raise NotImplementedError in torch's `context_parallel`, which replaces SDPA alone."""
    if torch.compiler.is_compiling():
        return
    if (F.scaled_dot_product_attention.__module__ or "").startswith("torch.distributed"):
        raise NotImplementedError(
            f"{op} does not support torch's context_parallel, which shards the sequence: each rank "
            "would attend to its own shard alone"
        )


def refuse_transforms(op: str) -> None:
    """Raise NotImplementedError under torch.func (vmap, grad, jvp) and forward-mode AD, which know
    nothing of kernels and of memory that is written in place, and in torch's `context_parallel`."""
    refuse_context_parallel(op)
    if torch.compiler.is_compiling() or (
        torch._C._functorch.peek_interpreter_stack() is None and forward_ad._current_level < 0
    ):
        return
    raise NotImplementedError(
        f"{op} supports neither torch.func (vmap, grad, jvp) nor forward-mode AD: use "
        "torch.autograd, and one call for each sample where gradients of samples are wanted"
    )
