"""Training on several GPUs by torch.distributed: context, tensor and data parallel.

`parallelize` applies all three to a model on a `DeviceMesh`; `docs/scaling.md` is a page of it.

b  batch     h  heads      n  tokens of a rank       d  head dimension
N  ranks of the mesh       c  tokens of a chunk      w  windows
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed._functional_collectives as collectives
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import Module

from . import blocks
from .attention import SparseAttention
from .checks import check_given, check_type
from .compress import Networks, compress_sequences
from .config import AttentionConfig, NSAConfig
from .ops import branches
from .ops.call import Call

# torch 2.12 gave it another name
all_gather = getattr(
    collectives, "all_gather_single_autograd", collectives.all_gather_tensor_autograd
)

# tensors of a call with a row for each query
QUERIES = ("q", "cq", "branch_gates", "block_indices")


def check_mesh(mesh: Any, names: Sequence[str] | None = None) -> None:
    """Check that a mesh has one dimension or, with `names`, dimensions of these, in this order."""
    check_type("mesh", mesh, DeviceMesh, "a torch.distributed DeviceMesh")
    given = mesh.mesh_dim_names
    if names is None and mesh.ndim != 1:
        raise ValueError(f"mesh must have one dimension, such as mesh['cp'], got {given}")
    if names is not None and (not given or [name for name in names if name in given] != [*given]):
        raise ValueError(f"mesh must have dimensions {', '.join(names)} or some, got {given}")


def sparse_layers(model: Any) -> list[SparseAttention]:
    check_type("model", model, Module, "an nn.Module")
    layers = [module for module in model.modules() if isinstance(module, SparseAttention)]
    if not layers:
        raise ValueError(f"model must have SparseAttention layers, got {type(model).__name__}")
    return layers


# context parallel


class ContextParallel:
    """A rank's place in the sequence, which 2 N equal chunks make up: rank r has chunks r and
    `2 N - 1 - r`, so that all ranks have equal work under a causal mask."""

    def __init__(self, mesh: DeviceMesh):
        self.rank, self.size = mesh.get_local_rank(), mesh.size()
        self.group: str = mesh.get_group().group_name
        self.chunks = self.rank, 2 * self.size - 1 - self.rank

    def check(self, inp: Tensor, config: NSAConfig, **others: Any) -> None:
        """Check the input [b n dim] of a layer, and refuse what needs the whole sequence."""
        for name, value in others.items():
            if value is not None:
                raise ValueError(f"{name} must be None under context parallelism")
        step = math.lcm(config.d if config.compresses else 1, config.selection_stride)
        chunk, odd = divmod(inp.shape[1], 2)
        if odd or chunk % step or chunk < self.halo_size(config):
            raise ValueError(
                f"inp must have a multiple of {2 * step} tokens on each context-parallel rank, and "
                f"at least {2 * self.halo_size(config)}, got {inp.shape[1]}"
            )

    def halo_size(self, config: NSAConfig) -> int:
        """Tokens before a chunk that its windows read, in whole strides."""
        overlap = config.compress_block_size - config.d if config.compresses else 0
        return blocks.ceil_div(overlap, config.d) * config.d

    def positions(self, inp: Tensor) -> Tensor:
        """The position of each token of [b n dim] in the whole sequence, [b n]."""
        chunk = inp.shape[1] // 2
        token = torch.arange(chunk, device=inp.device)
        return torch.cat([token + i * chunk for i in self.chunks]).expand(len(inp), -1)

    def gather(self, x: Tensor) -> Tensor:
        """All tokens in order, [b h (N n) d], of those of each rank [b h n d]. The gradients of all
        ranks are summed in a fixed order."""
        shards = all_gather(x.contiguous(), 0, self.group)
        head, tail = shards.unflatten(0, (self.size, -1)).unflatten(3, (2, -1)).unbind(3)
        return torch.cat((*head.unbind(), *tail.flip(0).unbind()), dim=2)

    def halos(self, chunks: Tensor, size: int) -> Tensor:
        """The `size` tokens before each of this rank's chunks [b h 2 c d]: [b h 2 size d], zeros
        before the sequence. Every rank receives the ends of all chunks."""
        ends = self.gather(chunks[..., -size:, :].flatten(2, 3))
        ends = F.pad(ends, (0, 0, size, 0)).unflatten(2, (-1, size))
        return torch.stack([ends[:, :, i] for i in self.chunks], dim=2)

    def gather_keys(
        self, tensors: dict[str, Tensor], raw: dict[str, Tensor], networks: Networks,
        config: NSAConfig, backend: str,
    ) -> dict[str, Tensor]:  # fmt: skip
        """Keys and values of the whole sequence: those of `tensors` [b h n d], and the compressed
        ones of `raw`, which each rank compresses for the windows that end in its chunks."""
        size, d = self.halo_size(config), config.d
        rows = {}
        for name, t in raw.items():
            chunks = t.unflatten(2, (2, -1))
            if size:
                chunks = torch.cat((self.halos(chunks, size), chunks), dim=3)
            rows[name] = chunks.transpose(1, 2).flatten(0, 1)  # [(b 2) h size + c d]
        compressed = compress_sequences(rows, networks, config, None, backend)
        keys = {name: t for name, t in tensors.items() if name not in ("q", "cq")}
        for name, t in compressed.items():
            windows = t[:, :, size // d :].unflatten(0, (-1, 2))
            keys[name] = windows.transpose(1, 2).flatten(2, 3)
        return {name: self.gather(t) for name, t in keys.items()}

    def attend(
        self, call: Call, config: AttentionConfig, backend: str, keep_slots: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """`branches.attend` of the queries [b n h d] of each chunk, at their positions."""
        size, results = call.q.shape[1] // 2, []
        for i, chunk in enumerate(self.chunks):
            rows = {
                name: t[:, i * size : (i + 1) * size]
                for name in QUERIES
                if (t := getattr(call, name)) is not None
            }
            part = call.but(**rows, q_offset=chunk * size)
            results.append(branches.attend(part, config, backend, keep_slots))
        (out, indices), (tail, tail_indices) = results
        out = torch.cat((out, tail), dim=1)
        # without keep_slots the chunks may have different numbers of slots
        if not keep_slots or indices is None or tail_indices is None:
            return out, None
        return out, torch.cat((indices, tail_indices), dim=1)


def context_parallel(model: Module, mesh: DeviceMesh) -> Module:
    """Shard the sequence of every `SparseAttention` layer of a model over the ranks of a mesh.

    A layer then takes and returns the shard [b, n, dim] of this rank, as `context_parallel_shard`
    makes it of [b, N n, dim], at the positions of the whole sequence. Outputs and gradients are
    those of one process: keys and values, rotated, and compressed and ranking keys are gathered
    (forward `2 N n K D` elements and fewer for compressed ones, backward a reduce-scatter of as
    many), and each rank attends with its own queries. For windows that begin in another chunk, each
    rank receives the last `l - d` tokens, in whole strides, of all 2 N chunks.

    The gradient of a weight is the part of this rank's tokens: sum it over the ranks, as
    `parallelize` does by FSDP. n must be a multiple of `2 lcm(d, selection_stride)`.

    Args:
        model: a `SparseAttention`, or a module that contains some. It is changed in place, and may
            have no other layers that mix tokens.
        mesh: of one dimension, such as `mesh["cp"]`.

    Returns:
        The model. Its sparse layers raise a ValueError if they are given a cache, packed documents
        or padding, flex masks or `ranking_queries`.

    Raises:
        ValueError: a mesh of several dimensions, or a model without `SparseAttention`.
    """
    check_mesh(mesh)
    context = ContextParallel(mesh)
    for layer in sparse_layers(model):
        layer.context = context
    return model


def context_parallel_shard(
    mesh: DeviceMesh, buffers: Sequence[Tensor], seq_dims: Sequence[int]
) -> list[Tensor]:
    """This rank's shards of whole sequences, head-tail balanced: rank r of N has chunks r and
    `2 N - 1 - r` of 2 N equal chunks.

    Args:
        mesh: of one dimension, such as `mesh["cp"]`.
        buffers: the same tensors on every rank: token ids, labels, inputs.
        seq_dims: for each of them, its dimension of tokens, a multiple of 2 N.

    Raises:
        ValueError: a length that is no multiple of 2 N.
    """
    check_mesh(mesh)
    shards, context = [], ContextParallel(mesh)
    for buffer, dim in zip(buffers, seq_dims, strict=True):
        check_given(buffers=buffer)
        if buffer.shape[dim] % (2 * context.size):
            raise ValueError(
                f"buffers must have a multiple of {2 * context.size} tokens, twice the ranks of "
                f"mesh, got {buffer.shape[dim]}"
            )
        chunks = buffer.chunk(2 * context.size, dim)
        shards.append(torch.cat([chunks[i] for i in context.chunks], dim))
    return shards


@torch.no_grad()
def context_parallel_unshard(
    mesh: DeviceMesh, buffers: Sequence[Tensor], seq_dims: Sequence[int]
) -> list[Tensor]:
    """The whole sequences of shards, on every rank: the way back of `context_parallel_shard`,
    without gradients."""
    check_mesh(mesh)
    context = ContextParallel(mesh)
    # `gather` has tokens as dimension 2 of 4
    return [
        context.gather(x.movedim(dim, 0).flatten(1)[None, None])[0, 0]
        .unflatten(1, x.movedim(dim, 0).shape[1:])
        .movedim(0, dim)
        for x, dim in zip(buffers, seq_dims, strict=True)
    ]
