"""Training on several GPUs by torch.distributed: context, tensor and data parallel.

`parallelize` applies all three to a model on a `DeviceMesh`; `docs/scaling.md` is a page of it.

b  batch     h  heads      n  tokens of a rank       d  head dimension
N  ranks of the mesh       c  tokens of a chunk      w  windows
"""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed._functional_collectives as collectives
import torch.nn.functional as F
from einops.layers.torch import Rearrange
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_module,
    distribute_tensor,
)
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)
from torch.func import functional_call
from torch.nn import Module

from . import blocks, compress, varlen
from .attention import SparseAttention, find_sparse_layers
from .checks import (
    check_block_indices,
    check_bools,
    check_documents,
    check_given,
    check_int,
    check_rows,
    check_type,
    refusal,
)
from .config import AttentionConfig, NSAConfig
from .ops import branches, reference
from .ops.call import Call
from .transformer import Transformer

# torch 2.12 gave it another name
all_gather = getattr(
    collectives, "all_gather_single_autograd", collectives.all_gather_tensor_autograd
)

# tensors of a call with a row for each query, and for each token or window
QUERIES = ("q", "cq", "branch_gates", "block_indices")
KEYS = ("k", "v", "ck", "cv", "window_k", "window_v")


def check_mesh(mesh: Any, names: Sequence[str] | None = None) -> None:
    """Check that a mesh has one dimension or, with `names`, dimensions of these, in this order."""
    check_type("mesh", mesh, DeviceMesh, "a torch.distributed DeviceMesh")
    given = mesh.mesh_dim_names
    if names is None and mesh.ndim != 1:
        raise ValueError(f"mesh must have one dimension, such as mesh['cp'], got {given}")
    if names is not None and (not given or [name for name in names if name in given] != [*given]):
        raise ValueError(f"mesh must have dimensions {', '.join(names)} or some, got {given}")


def sparse_layers(model: Any) -> list[SparseAttention]:
    """The layers of a model; none of a model under `hf.use_sparse_attention`."""
    if is_pretrained(model) and model.config._attn_implementation == "nsa":
        return [module for module in model.modules() if isinstance(module, SparseAttention)]
    return [*find_sparse_layers(model).values()]


def refuse(kind: str, arguments: dict[str, Any]) -> None:
    for name, value in arguments.items():
        if value is not None:
            raise refusal(name, f"None under {kind} parallelism", value)


@dataclass(frozen=True)
class Route:
    """Which entries of a rank's rows [b n] another order of all rows needs, rank by rank."""

    order: Tensor  # [1 m], entries of the flat rows, grouped by the rank that they go to
    place: Tensor  # [1 (b n)], where each entry of the rows is in `order`; -1 for nowhere
    counts: list[int]  # of each rank

    @classmethod
    def from_entries(cls, entry: Tensor, rank: Tensor, ranks: int, size: int, device: Any) -> Route:
        """On a device, from this rank's entries [m] of `size`, and the ranks that they go to."""
        order = entry[rank.argsort(stable=True)]
        place = torch.full((size,), -1, device=order.device)
        place[order] = torch.arange(len(order), device=order.device)
        counts = rank.bincount(minlength=ranks).tolist()
        return cls(order[None].to(device), place[None].to(device), counts)


@dataclass(frozen=True)
class ShardedLayout(varlen.Layout):
    """The layout of rows that are shards, before and after. Tokens whose rank differs between the
    two go there by all-to-all. `documents`, `source` and `target` are those of this rank's tokens,
    with positions in whole rows."""

    routes: tuple[Route, Route]  # of the caller's rows, and of aligned rows
    group: str

    def move(self, x: Tensor, sent: Route, received: Route) -> Tensor:
        rows = len(x)
        x = varlen.Move.apply(x.flatten(0, 1)[None], sent.order, sent.place)[0]
        counts = received.counts, sent.counts
        x = collectives.all_to_all_single_autograd(x.contiguous(), *counts, self.group)
        x = varlen.Move.apply(x[None], received.place, received.order)[0]
        return x.unflatten(0, (rows, -1))

    def spread(self, x: Tensor) -> Tensor:
        return self.move(x, *self.routes)

    def collect(self, x: Tensor) -> Tensor:
        return self.move(x, *reversed(self.routes))


class ContextParallel:
    """A rank's place in the sequence, which 2 N equal chunks make up: rank r has chunks r and
    `2 N - 1 - r`, so that all ranks have equal work under a causal mask."""

    def __init__(self, mesh: DeviceMesh):
        self.rank, self.size = mesh.get_local_rank(), mesh.size()
        self.group: str = mesh.get_group().group_name
        self.chunks = self.rank, 2 * self.size - 1 - self.rank

    def halo_size(self, config: AttentionConfig) -> int:
        """Tokens before a chunk that its windows read, in whole strides."""
        overlap = config.compress_block_size - config.d if config.compresses else 0
        return blocks.ceil_div(overlap, config.d) * config.d

    def check_length(self, name: str, n: int, config: AttentionConfig) -> None:
        """Check the tokens of a rank: two chunks of whole windows and groups."""
        (chunk, odd), halo = divmod(n, 2), self.halo_size(config)
        step = math.lcm(config.d if config.compresses else 1, config.leader_stride)
        if odd or chunk % step or chunk < halo:
            expected = f"a multiple of {2 * step} tokens on each context-parallel rank"
            raise ValueError(f"{name} must have {expected}, at least {2 * halo}, got {n}")

    def positions(self, inp: Tensor) -> Tensor:
        """The position of each token of [b n ..] in the whole sequence, [b n]."""
        chunk = inp.shape[1] // 2
        token = torch.arange(chunk, device=inp.device)
        return torch.cat([token + i * chunk for i in self.chunks]).expand(len(inp), -1)

    def shard(self, x: Tensor, dim: int = 1) -> Tensor:
        """This rank's chunks of all tokens."""
        chunks = x.chunk(2 * self.size, dim)
        return torch.cat([chunks[i] for i in self.chunks], dim)

    def find(self, position: Tensor, length: int) -> tuple[Tensor, Tensor]:
        """Which rank has a position of rows of `length` tokens, and where in its shard."""
        chunk = length // (2 * self.size)
        i, offset = position // chunk, position % chunk
        is_tail = i >= self.size
        return torch.where(is_tail, 2 * self.size - 1 - i, i), offset + chunk * is_tail

    def layout(
        self, inp: Tensor, config: NSAConfig, documents: varlen.Documents | None,
        ranking_queries: Any, cu_seqlens: Tensor | None, segment_ids: Tensor | None,
        **others: Any,
    ) -> ShardedLayout | None:  # fmt: skip
        """The layout of a shard [b n ..] of rows. `cu_seqlens` or `segment_ids` name the documents
        of whole rows, `documents` those of aligned ones. Refuses what needs whole sequences."""
        refuse("context", others)
        check_documents(documents, inp.shape[:2], 0, inp.device)
        bounds: dict[str, Any] = dict(cu_seqlens=cu_seqlens, segment_ids=segment_ids)
        # of whole rows, without memory
        check_rows(
            inp.new_empty(()).expand(len(inp), self.size * inp.shape[1]), False, None, **bounds
        )
        names = [name for name, value in bounds.items() if value is not None]
        if not names:
            return None
        if documents is not None:
            raise ValueError(f"documents and {names[0]} are two ways to name documents: give one")
        if ranking_queries is not None:
            expected = f"None with {names[0]} under context parallelism: give documents"
            raise refusal("ranking_queries", expected, ranking_queries)
        (b, n), host = inp.shape[:2], bounds[names[0]].device
        if n == 0 or n % 2:
            raise ValueError(f"inp must have two chunks on each context-parallel rank, got {n}")
        rows = varlen.layout((b, n * self.size), host, config.alignment, **bounds)
        # aligned rows of 2 N equal chunks: what they have more is of no document
        length, step = rows.source.shape[1], config.alignment
        chunk = max(blocks.ceil_div(length, 2 * self.size), self.halo_size(config))
        aligned = blocks.ceil_div(chunk, step) * step * 2 * self.size
        end = aligned - length
        first, last = (torch.cat((t, t[:, -1:].expand(-1, end)), dim=1) for t in rows.documents)
        own = self.shard(torch.stack((first, last, F.pad(rows.source, (0, end), value=-1))), dim=2)
        target = self.shard(rows.target)

        token = torch.arange(n * self.size, device=host).expand(b, -1)
        row = torch.arange(b, device=host)[:, None]
        places = self.find(token, n * self.size), self.find(rows.target, aligned)
        routes = []
        for (rank, i), (other, _), size in zip(
            places, reversed(places), (n, aligned // self.size), strict=True
        ):
            is_own = rank == self.rank
            entry = (i + row * size)[is_own]
            routes.append(Route.from_entries(entry, other[is_own], self.size, b * size, inp.device))
        first, last, source = own.to(inp.device)
        documents = varlen.Documents(first.int(), last.int())
        return ShardedLayout(
            documents, source, target.to(inp.device), (routes[0], routes[1]), self.group
        )

    def gather(self, x: Tensor) -> Tensor:
        """All tokens in order, [b h (N n) d], of those of each rank [b h n d]. The gradients of all
        ranks are summed in a fixed order."""
        # [2 b h c d]: gradients of the chunks of all ranks are then stacked in one copy
        chunks = x.unflatten(2, (2, -1)).movedim(2, 0).contiguous()
        heads_tails = all_gather(chunks, 0, self.group).unbind()
        return torch.cat((*heads_tails[::2], *heads_tails[:0:-2]), dim=2)

    def halos(self, chunks: Tensor, size: int) -> Tensor:
        """The `size` tokens before each of this rank's chunks [b h 2 c d]: [b h 2 size d], zeros
        before the sequence. Every rank receives the ends of all chunks."""
        ends = self.gather(chunks[..., -size:, :].flatten(2, 3))
        ends = F.pad(ends, (0, 0, size, 0)).unflatten(2, (-1, size))
        return torch.stack([ends[:, :, i] for i in self.chunks], dim=2)

    def compress(
        self, raw: dict[str, Tensor], networks: compress.Networks, config: AttentionConfig,
        documents: varlen.Documents | None,
    ) -> dict[str, Tensor]:  # fmt: skip
        """`compress.compress_sequences` of the windows that end in the chunks of this rank."""
        size, d = self.halo_size(config), config.d
        rows = {}
        for name, t in raw.items():
            chunks = t.unflatten(2, (2, -1))
            if size:
                chunks = torch.cat((self.halos(chunks, size), chunks), dim=3)
            rows[name] = chunks.transpose(1, 2).flatten(0, 1)  # [(b 2) h size + c d]
        if documents is not None and raw:
            documents = self.chunk_documents(documents, size)
        compressed = compress.compress_sequences(rows, networks, config, documents)
        for name, t in compressed.items():
            windows = t[:, :, size // d :].unflatten(0, (-1, 2))
            compressed[name] = windows.transpose(1, 2).flatten(2, 3)
        return compressed

    def chunk_documents(self, documents: varlen.Documents, size: int) -> varlen.Documents:
        """The documents of [(b 2) size + c] tokens of each chunk, counted from the first of these:
        any for the `size` tokens before the chunk, whose windows are not kept."""
        bounds = []
        for bound in documents:
            chunk = bound.shape[1] // 2
            starts = bound.new_tensor(self.chunks) * chunk - size
            chunks = bound.unflatten(1, (2, chunk)) - starts[:, None]
            bounds.append(F.pad(chunks, (size, 0)).flatten(0, 1))
        return varlen.Documents(*bounds)

    def gather_chunks(self, shards: dict[str, Tensor], i: int) -> dict[str, Tensor]:
        """Chunk i of [b n h d] of each rank, [N b c h d], in one collective. They are there when
        they are read."""
        chunks = [t.chunk(2, 1)[i] for t in shards.values()]
        gathered = all_gather(torch.cat([t.flatten() for t in chunks])[None], 0, self.group)
        parts = gathered.split([t.numel() for t in chunks], dim=1)
        rows = (part.unflatten(1, t.shape) for part, t in zip(parts, chunks, strict=True))
        return dict(zip(shards, rows, strict=True))

    def attend(
        self, call: Call, config: AttentionConfig, backend: str, keep_slots: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """`branches.attend` of the queries [b n h d] of each chunk, at their positions, over the
        keys and values of all ranks. The first chunk of a causal call sees none of the last half of
        the sequence, which travels while it attends."""
        size, results = call.q.shape[1] // 2, []
        halves = {n: t.chunk(2, 1) for n in QUERIES if (t := getattr(call, n)) is not None}
        shards = {n: t for n in KEYS if (t := getattr(call, n)) is not None}
        if call.ck is call.k:  # tokens rank blocks
            del shards["ck"]
        elif call.ck is not None and not ("compressed" in config.branches or config.use_diff_topk):
            # they rank without a gradient; those of an index are of one head
            shards["ck"] = call.ck[:, :, : 1 if call.ck.stride(2) == 0 else None].detach()
        chunks = self.gather_chunks(shards, 0)
        keys = {name: torch.cat(t.unbind(), dim=1) for name, t in chunks.items()}
        chunks = self.gather_chunks(shards, 1)
        for i, chunk in enumerate(self.chunks):
            if i == config.causal:  # before the second chunk; else the first one sees all, too
                tails = {name: t.unbind()[::-1] for name, t in chunks.items()}
                keys = {name: torch.cat((t, *tails[name]), dim=1) for name, t in keys.items()}
            own = slice(i * size, (i + 1) * size)
            rows = {name: parts[i] for name, parts in halves.items()}
            if call.ck is not None:
                rows["ck"] = keys.get("ck", keys["k"]).expand(-1, -1, call.k.shape[2], -1)
            documents = reference.slice_documents(call.documents, own)
            part = call.but(**keys | rows, documents=documents, q_offset=chunk * size)
            results.append(branches.attend(part, config, backend, keep_slots))
        (out, indices), (tail, tail_indices) = results
        out = torch.cat((out, tail), dim=1)
        if config.use_diff_topk and call.ck is not None:
            # dense chunks read no ranking: all ranks reduce its gradients
            out = out + rows["ck"][..., :0].sum()
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
    `parallelize` does by FSDP. n must be a multiple of `2 lcm(d, R)`, with R the selection_stride,
    or the tokens of a group of blocks where these rank first.

    Args:
        model: a `SparseAttention`, or a module that contains some. It is changed in place, and may
            have no other layers that mix tokens.
        mesh: of one dimension, such as `mesh["cp"]`.

    Returns:
        The model. Its sparse layers raise a ValueError if they are given a cache, padding, or flex
        masks. `cu_seqlens` and `segment_ids` are those of whole rows, the same on all ranks;
        `documents` and `ranking_queries` are of this rank's tokens.
    """
    check_mesh(mesh)
    context = ContextParallel(mesh)
    for layer in sparse_layers(model):
        layer.context = context
    if is_pretrained(model):
        shard_pretrained(model, context)
    return model


def check_buffers(buffers: Any, seq_dims: Any, step: int, why: str) -> None:
    """Check tensors, and that their dimensions of tokens are multiples of `step`."""
    check_type("buffers", buffers, Sequence, "a list of tensors")
    check_type("seq_dims", seq_dims, Sequence, "a list of integers")
    if len(seq_dims) != len(buffers):
        raise refusal("seq_dims", f"{len(buffers)} dimensions, one for each of buffers", seq_dims)
    for buffer, dim in zip(buffers, seq_dims, strict=True):
        check_given(buffers=buffer)
        check_int("seq_dims", dim, -buffer.ndim, buffer.ndim)
        if buffer.shape[dim] % step:
            expected = f"a multiple of {step} tokens, {why}"
            raise ValueError(f"buffers must have {expected}, got {buffer.shape[dim]}")


def context_parallel_shard(
    mesh: DeviceMesh, buffers: Sequence[Tensor], seq_dims: Sequence[int]
) -> list[Tensor]:
    """This rank's shards of whole sequences, head-tail balanced: rank r of N has chunks r and
    `2 N - 1 - r` of 2 N equal chunks.

    Args:
        mesh: of one dimension, such as `mesh["cp"]`.
        buffers: the same tensors on every rank: token ids, labels, inputs.
        seq_dims: for each of them, its dimension of tokens, a multiple of 2 N.
    """
    check_mesh(mesh)
    context = ContextParallel(mesh)
    check_buffers(buffers, seq_dims, 2 * context.size, "twice the ranks of mesh")
    return [context.shard(x, dim) for x, dim in zip(buffers, seq_dims, strict=True)]


@torch.no_grad()
def context_parallel_unshard(
    mesh: DeviceMesh, buffers: Sequence[Tensor], seq_dims: Sequence[int]
) -> list[Tensor]:
    """The whole sequences of shards, on every rank: the way back of `context_parallel_shard`,
    without gradients."""
    check_mesh(mesh)
    context = ContextParallel(mesh)
    check_buffers(buffers, seq_dims, 2, "two chunks")
    sequences = []
    for buffer, dim in zip(buffers, seq_dims, strict=True):
        tokens = buffer.movedim(dim, 0)
        gathered = context.gather(tokens.reshape(1, 1, len(tokens), -1))
        sequences.append(gathered.reshape(-1, *tokens.shape[1:]).movedim(0, dim))
    return sequences


# the dimension by which weights of a layer are sharded, that of heads; others are of all heads.
# `to_qkv` has rows of queries, keys and values: a rank stores other rows than it multiplies by
HEADS = {
    "to_qkv.weight": 0, "to_qkv.bias": 0, "to_strategy_combine.0.weight": 0,
    "to_strategy_combine.0.bias": 0, "k_intrablock_positions": 0, "v_intrablock_positions": 0,
    "compress_mem_kv": 1, "sinks": 1, "combine_heads.weight": 1,
}  # fmt: skip
# compression networks that do not mix heads
NETWORKS = (
    compress.MeanPool, compress.SumPool, compress.CompressMLP, compress.AttentionPool,
    compress.SingleProjection, compress.GroupedMLP, compress.ConvLinearCompress,
)  # fmt: skip


def split_config(config: NSAConfig, size: int) -> NSAConfig:
    """The settings of a rank's heads."""
    index_heads = max(1, config.index_heads // size)
    heads, kv_heads = config.heads // size, config.kv_heads // size
    return replace(config, heads=heads, kv_heads=kv_heads, index_heads=index_heads)


class TensorParallelAttention(SparseAttention):
    """A `SparseAttention` whose weights are DTensors: a rank computes the branches of `H / size`
    query heads and their KV heads, and the outputs are summed. `split_heads` makes one of a layer.

    The weights keep their names and, whole, their values, so that checkpoints of any mesh load. In
    each forward a rank gathers the weight of `to_qkv` and multiplies by the rows of its own heads.
    A cache holds the KV heads of its rank.
    """

    mesh: DeviceMesh
    # a SparseAttention with the settings of a rank's heads, whose weights each call gives. It is in
    # a tuple, so that it is no child.
    local: tuple[SparseAttention]
    # the settings that those of `local` were made from
    whole: NSAConfig

    @property
    def geometry(self) -> dict[str, Any]:
        """That of a cache."""
        return self.local[0].config.geometry

    def forward(self, inp: Tensor, cache: Any = None, *args: Any, **settings: Any) -> Any:
        refused = dict(collect=self.observer, ranking_queries=settings.get("ranking_queries"))
        refuse("tensor", refused)
        (local,), mesh, given = self.local, self.mesh, settings.get("block_indices")
        if given is not None:  # of all heads, as those that are returned
            check_block_indices(inp, given, False, cache is not None, self.config)
            if given.shape[2] > 1:
                settings["block_indices"] = given.chunk(mesh.size(), 2)[mesh.get_local_rank()]
        if self.whole is not self.config:
            self.whole, local.config = self.config, split_config(self.config, mesh.size())
        for name in ("dense", "context", "identity"):
            if getattr(local, name) is not getattr(self, name):
                setattr(local, name, getattr(self, name))
        tensors = {name: self.local_weight(name, p) for name, p in self.named_parameters()}
        # the gradient of the input is the sum of those of all ranks
        replicated: Any = DTensor.from_local(inp, mesh, [Replicate()], run_check=False)
        inp = replicated.to_local(grad_placements=[Partial()])
        tensors |= dict(self.named_buffers())
        result = functional_call(local, tensors, (inp, cache, *args), settings)
        out, *others = result if isinstance(result, tuple) else (result,)
        out = DTensor.from_local(out, mesh, [Partial()], run_check=False)
        out = out.redistribute(placements=[Replicate()]).to_local()
        if settings.get("return_block_indices"):
            heads: Any = DTensor.from_local(others[-1], mesh, [Shard(2)], run_check=False)
            others[-1] = heads.redistribute(placements=[Replicate()]).to_local()
        return (out, *others) if others else out

    def local_weight(self, name: str, weight: Any) -> Tensor:
        """What this rank multiplies by, of a weight as DTensor."""
        config, mesh = self.config, self.mesh
        rank, size = mesh.get_local_rank(), mesh.size()
        is_fused = name.startswith(("to_qkv.", "to_index."))
        if isinstance(weight.placements[0], Shard) and not is_fused:
            return weight.to_local()  # type: ignore[no-any-return]
        whole = to_replica(weight)
        if name == "combine_heads.bias":  # added once to the sum over ranks
            whole = whole * (rank == 0)
        if not is_fused:
            return whole
        sizes = list(self.qkv_split)
        if name == "to_index.weight":
            sizes = [heads * config.index_dim for heads in (config.kv_heads, config.index_heads)]
        *parts, last = whole.split(sizes)
        parts = [part.chunk(size)[rank] for part in parts]
        is_shared = name == "to_index.weight" and config.index_heads == 1
        return torch.cat([*parts, last if is_shared else last.chunk(size)[rank]])


def to_replica(weight: Any) -> Tensor:
    """The whole of a DTensor; its gradient is the sum of those of all ranks."""
    whole: Any = weight.redistribute(placements=[Replicate()])
    return whole.to_local(grad_placements=[Partial()])  # type: ignore[no-any-return]


def split_heads(layer: SparseAttention, mesh: DeviceMesh) -> None:
    """Make a layer a `TensorParallelAttention` over a mesh of one dimension."""
    config, size = layer.config, mesh.size()
    if type(layer) is not SparseAttention:
        raise ValueError(f"model must have layers of SparseAttention, got {type(layer).__name__}")
    if config.kv_heads % size:
        got = f"kv_heads={config.kv_heads} (heads={config.heads})"
        raise refusal("kv_heads", f"a multiple of the {size} tensor-parallel ranks", got=got)
    for network in (layer.k_compress, layer.v_compress):
        if network is not None and type(network) not in NETWORKS:
            expected = "a network of native_sparse_attention.compress that does not mix heads"
            expected += " under tensor parallelism"
            raise refusal("compress_mlp", expected, got=type(network).__name__)
    gate: Any = layer.to_strategy_combine
    if gate is not None and not isinstance(gate[0], nn.Linear):
        expected = "an nn.Linear under tensor parallelism"
        raise refusal("strategy_combine_mlp", expected, got=type(gate[0]).__name__)
    local = deepcopy(layer).to("meta")
    local.config = split_config(config, size)
    local.qkv_split = tuple(width // size for width in layer.qkv_split)
    if gate is not None:
        split: Any = Rearrange("b n (h s) -> b n h s", h=local.config.heads, s=len(config.branches))
        local.to_strategy_combine = nn.Sequential(gate[0], gate[1], split)
    for module in local.modules():
        if isinstance(module, nn.Conv1d):
            module.groups //= size
    for name, module in layer.named_modules():
        for key in [*dict(module.named_parameters(recurse=False))]:
            dim = HEADS.get(f"{name}.{key}".lstrip("."))
            if isinstance(module, nn.Conv1d):
                dim = 0
            elif isinstance(module, compress.LinearPerHead):  # [h i o], and biases [1 h 1 o]
                dim = 0 if key == "weight" else 1
            distribute(module, key, mesh, Replicate() if dim is None else Shard(dim))
    layer.__class__ = TensorParallelAttention
    layer.mesh, layer.local, layer.whole = mesh, (local,), config


def distribute(module: Module, name: str, mesh: DeviceMesh, placement: Placement) -> None:
    """Make a parameter a DTensor, unless it is one: a module that layers share."""
    weight = getattr(module, name)
    if not isinstance(weight, DTensor):
        shards = nn.Parameter(distribute_tensor(weight, mesh, [placement]), weight.requires_grad)
        module.register_parameter(name, shards)


def replicate(module: Module, mesh: DeviceMesh) -> None:
    """Make the weights of a module DTensors that every rank has whole: optimizers and norms of
    gradients want all weights of one kind."""

    def enter(module: Module, inputs: Any, mesh: DeviceMesh) -> Any:
        return tuple(DTensor.from_local(x, mesh, [Replicate()], run_check=False) for x in inputs)

    def leave(module: Module, out: Any, mesh: DeviceMesh) -> Any:
        return out.to_local()

    distribute_module(module, mesh, None, enter, leave)


def split_transformer(model: Transformer, mesh: DeviceMesh) -> None:
    """Split the feed-forward layers of a model; its other weights are replicated."""
    feed_forward: Any
    for _, feed_forward in model.layers:  # type: ignore[misc]
        width = feed_forward[1].out_features
        if width % mesh.size():
            expected = f"a hidden width that {mesh.size()} tensor-parallel ranks divide"
            raise ValueError(f"ff_expansion_factor must give {expected}, got {width}")
        replicate(feed_forward[0], mesh)
        parallelize_module(feed_forward, mesh, {"1": ColwiseParallel(), "3": RowwiseParallel()})
    for module in (model.token_emb, model.norm, model.to_logits):
        replicate(module, mesh)


class HeadNormParallel(ParallelStyle):
    """A norm of single heads, whose weights every rank has whole. Its gradient is the sum over
    ranks, each of which has its own heads. (That of torch's SequenceParallel is no sum in 2.8.)"""

    def _apply(self, module: Module, device_mesh: DeviceMesh) -> Module:
        local = deepcopy(module).to("meta")
        for name in [*dict(module.named_parameters())]:
            distribute(module, name, device_mesh, Replicate())

        def forward(x: Tensor) -> Any:
            weights = {name: to_replica(p) for name, p in module.named_parameters()}
            return functional_call(local, weights, (x,))

        module.forward = forward
        return module


# styles of their `tp_plan`
STYLES: dict[str, ParallelStyle] = {
    "colwise": ColwiseParallel(),
    "rowwise": RowwiseParallel(),
    "colwise_gather_output": ColwiseParallel(output_layouts=Replicate()),
    "embedding_rowwise": RowwiseParallel(input_layouts=Replicate()),
    "replicated_with_grad_allreduce": HeadNormParallel(),
}
# arguments of their forwards that need the whole sequence
WHOLE = (
    "attention_mask", "cache", "past_key_values", "cu_seq_lens_q", "cu_seq_lens_k", "seq_idx",
    "ranking_queries",
)  # fmt: skip


def is_pretrained(model: Any) -> bool:
    """Whether a model is a PreTrainedModel of transformers, which this does not import."""
    return hasattr(model, "_no_split_modules") and hasattr(model, "config")


def shard_pretrained(model: Any, context: ContextParallel) -> None:
    """Give a model of transformers the positions of its shard. Refuse what needs the whole
    sequence."""

    def enter(decoder: Any, inputs: Any, arguments: dict[str, Any]) -> Any:
        from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

        refuse("context", {name: arguments.get(name) for name in WHOLE})
        arguments["use_cache"] = False
        named = arguments.get("input_ids"), arguments.get("inputs_embeds")
        x = next((t for t in (*inputs, *named) if t is not None), None)
        if x is None:  # which the decoder refuses
            return inputs, arguments
        n, given = x.shape[1], arguments.get("position_ids")
        if n % 2:
            expected = "have two chunks on each context-parallel rank"
            raise ValueError(f"input_ids must {expected}, got {n} tokens")
        positions = context.positions(x)
        shape = getattr(given, "shape", ())
        if given is not None and (shape[-1:] != (n,) or bool((given != positions[0]).any())):
            raise refusal("position_ids", "those of the shard", given)
        mask = ALL_MASK_ATTENTION_FUNCTIONS["nsa"](len(x), n, n, config=decoder.config)
        mask = replace(mask, has_positions=True)  # which jump from chunk to chunk
        arguments |= dict(position_ids=positions, attention_mask=mask)
        return inputs, arguments

    def check_labels(model: Any, inputs: Any, arguments: dict[str, Any]) -> None:
        named = inspect.signature(model.forward).bind_partial(*inputs, **arguments).arguments
        if named.get("labels") is not None and arguments.get("shift_labels") is None:
            # the next token may be another rank's
            expected = "None without shift_labels under context parallelism"
            raise refusal("labels", expected, got="labels alone")

    for module in model.modules():  # attention that runs under `hf.use_sparse_attention`
        if hasattr(module, "indexer"):
            expected = "not select blocks by itself under context parallelism"
            raise ValueError(f"model must {expected}, got {type(module).__name__}")
        if hasattr(module, "layer_idx"):
            module.context = context
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else model
    decoder.register_forward_pre_hook(enter, with_kwargs=True)
    model.register_forward_pre_hook(check_labels, with_kwargs=True)


def split_pretrained(model: Any, mesh: DeviceMesh, is_drop_in: bool) -> None:
    """Split modules by the `tp_plan` of a model; its other weights are replicated."""
    kv_heads = model.config.num_key_value_heads
    if is_drop_in and kv_heads % mesh.size():
        expected = f"a multiple of the {mesh.size()} tensor-parallel ranks"
        raise ValueError(f"model must have {expected} as num_key_value_heads, got {kv_heads}")
    plan: dict[str, str] = {}
    for pattern, style in (model.tp_plan or {}).items():
        form = re.compile(re.escape(pattern).replace(r"\*", r"\d+"))
        plan |= {name: style for name, _ in model.named_modules() if form.fullmatch(name)}
    if unknown := {name: style for name, style in plan.items() if style not in STYLES}:
        expected = f"have the styles {', '.join(STYLES)}, got {next(iter(unknown.items()))}"
        raise ValueError(f"tp_plan of {type(model).__name__} must {expected}")
    tied = getattr(model.config, "tie_word_embeddings", False)
    parallelize_module(model, mesh, {name: STYLES[style] for name, style in plan.items()})
    local = {name.rpartition(".")[0] for name, style in plan.items() if style == "colwise"}
    for name, module in [*model.named_modules()]:
        parameters = dict(module.named_parameters(recurse=False))
        if all(isinstance(p, DTensor) for p in parameters.values()):
            continue
        if [*module.children()] or name.rpartition(".")[0] in local | {name}:
            kind = type(model).__name__
            raise ValueError(f"tp_plan of {kind} must name {name}, which has {[*parameters]}")
        replicate(module, mesh)
    if tied:
        model.get_output_embeddings().weight = model.get_input_embeddings().weight


def parallelize(
    model: Module,
    mesh: DeviceMesh,
    *,
    blocks: Sequence[Module] | None = None,
    tp_plan: Mapping[str, ParallelStyle] | None = None,
    activation_checkpointing: bool = False,
    compile: bool | Mapping[str, Any] = False,
    mp_policy: MixedPrecisionPolicy | None = None,
) -> Module:
    """Distribute a model over a mesh, in place: context and tensor parallelism, activation
    checkpointing, `torch.compile`, FSDP2, in this order. Make the optimizer afterwards.

    * "cp" shards the sequence: `context_parallel`.
    * "tp" splits the heads of sparse layers by KV head, with gates, compression, sinks and ranking,
      the feed-forward layers of a `Transformer`, and a model of transformers by its own `tp_plan`.
      All ranks take the same input.
    * "dp" takes other rows. FSDP2 shards weights over the ranks of "dp" and "cp" together and
      averages gradients over them, so that each rank gives the mean loss of its own tokens.

    Args:
        model: a `Transformer`, a module that contains `SparseAttention` layers, or a model of
            transformers: an `NSAForCausalLM`, of `hf.convert`, or of `hf.use_sparse_attention`.
        mesh: dimensions "dp", "cp" and "tp", in this order; any may be missing or of size 1.
        blocks: modules that are compiled and sharded one by one; by default the layers of a
            `Transformer` or a model of transformers, none of another model.
        tp_plan: styles of `torch.distributed.tensor.parallel` for other modules of the model.
        activation_checkpointing: recompute each layer in the backward pass; of a `Transformer` or a
            model of transformers.
        compile: compile each block; a dict has arguments of `torch.compile`.
        mp_policy: dtypes of FSDP2, such as `MixedPrecisionPolicy(param_dtype=torch.bfloat16)`.

    Returns:
        The model. State dicts have the names and whole shapes of one process.
    """
    check_mesh(mesh, ("dp", "cp", "tp"))
    check_bools(activation_checkpointing=activation_checkpointing)
    names: tuple[str, ...] = mesh.mesh_dim_names or ()
    data = tuple(name for name in names if name != "tp")
    pretrained: Any = model if is_pretrained(model) else None
    if activation_checkpointing and not isinstance(model, Transformer) and pretrained is None:
        expected = "goes with a Transformer or a model of transformers: wrap other layers"
        raise ValueError(f"activation_checkpointing {expected}")
    check_type("tp_plan", tp_plan, Mapping, "a mapping of names to styles", or_none=True)
    expected = "a MixedPrecisionPolicy"
    check_type("mp_policy", mp_policy, MixedPrecisionPolicy, expected, or_none=True)
    if not isinstance(compile, Mapping):
        check_bools(compile=compile)
    for name, value, needed in (("tp_plan", tp_plan, "tp"), ("mp_policy", mp_policy, "dp or cp")):
        if value is not None and not (data if name == "mp_policy" else "tp" in names):
            raise ValueError(f"{name} needs {needed} among the dimensions of mesh, got {names}")
    layers = sparse_layers(model)
    check_type("blocks", blocks, Iterable, "modules of the model", or_none=True)
    blocks = None if blocks is None else [*blocks]
    for block in blocks or ():
        check_type("blocks", block, Module, "modules of the model")
    if blocks is None:
        blocks = [*model.layers] if isinstance(model, Transformer) else []
        if pretrained is not None:
            kinds = pretrained._no_split_modules or ()
            blocks = [module for module in model.modules() if type(module).__name__ in kinds]

    if "cp" in names and mesh["cp"].size() > 1:
        context_parallel(model, mesh["cp"])
    if "tp" in names and mesh["tp"].size() > 1:
        for layer in layers:
            split_heads(layer, mesh["tp"])
        if isinstance(model, Transformer):
            split_transformer(model, mesh["tp"])
        if pretrained is not None and tp_plan is None:
            split_pretrained(pretrained, mesh["tp"], is_drop_in=not layers)
        if tp_plan is not None:
            parallelize_module(model, mesh["tp"], dict(tp_plan))
    if isinstance(model, Transformer) and activation_checkpointing:
        model.activation_checkpointing = True
    elif activation_checkpointing:
        enable = getattr(pretrained, "activation_checkpointing_enable", None)  # since 5.24
        (enable or pretrained.gradient_checkpointing_enable)(dict(use_reentrant=False))
    if compile:
        for block in blocks:
            block.compile(**(compile if isinstance(compile, Mapping) else {}))
    ranks = mesh[data[0]] if len(data) == 1 else mesh[data]._flatten("dp_cp") if data else None
    if ranks is not None and (ranks.size() > 1 or mp_policy is not None):
        policy = {} if mp_policy is None else dict(mp_policy=mp_policy)
        for module in (*blocks, model):
            sharded: Any = fully_shard(module, mesh=ranks, **policy)
            if mesh.device_type == "cpu":  # over gloo torch 2.8 forgets to divide by the ranks
                sharded.set_force_sum_reduction_for_comms(True)
    return model
