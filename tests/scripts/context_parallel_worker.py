"""Layers whose sequence is sharded over all processes equal the whole layer: `check_layers`."""

import pytest
import torch
import torch.distributed as dist

from native_sparse_attention import KVCache, NSAConfig, SparseAttention
from native_sparse_attention.compress import MeanPool, SumPool
from native_sparse_attention.distributed import (
    context_parallel,
    context_parallel_shard,
    context_parallel_unshard,
)
from native_sparse_attention.varlen import Documents
from tests.helpers.sizes import sizes

SHAPE = dict(dim=16, dim_head=8, heads=4, kv_heads=2, causal=True)
SIZES = sizes(8, 4, 8, n=2, w=11)
ONE_SOFTMAX = SIZES | sizes(
    1, 1, branches=("selected",), importance="max", rank_rotated=True, num_initial_blocks=1
)
STAGES = ONE_SOFTMAX | sizes(4, 4, 4, num_local_blocks=4, num_selected_groups=1)
INDEX = SIZES | dict(branches=("selected", "window"), importance="index", index_dim=6)
PAPER = SIZES | dict(importance="probs", branch_kv="independent", num_initial_blocks=1)
SHORT = SIZES | dict(num_initial_blocks=1, num_local_blocks=2)
# settings and networks
CASES: dict[str, tuple[dict, dict]] = {
    "one-softmax": (ONE_SOFTMAX, {}),
    "dense up to 24 tokens": (ONE_SOFTMAX | dict(dense_length=24), {}),
    "two stages": (STAGES, {}),
    "paper, means": (PAPER, dict(compress_mlp=MeanPool())),
    "short-windows": (SHORT, {}),
    "interpolated": (SHORT | dict(interpolated_importance_score=True, qk_norm=True), {}),
    "windows over two chunks": (SIZES | dict(compress_block_size=15), {}),
    "differentiable top-k": (SIZES | dict(use_diff_topk=True, attention_sinks=True), {}),
    "index": (INDEX, {}),
    "index, rotated tokens": (ONE_SOFTMAX | dict(importance="index"), {}),
    "not causal": (SIZES | dict(causal=False), dict(compress_mlp=SumPool(8))),
    "compressed": (SIZES | dict(branches=("compressed",)), {}),
    "compressed, selected": (SIZES | dict(branches=("compressed", "selected")), {}),
    "compressed, window": (SIZES | dict(branches=("compressed", "window")), {}),
    "window": (SIZES | dict(branches=("window",), use_diff_topk=True), {}),
}

# of tokens that share a ranking
STRIDE: dict[str, int] = dict(selection_stride=4)
STRIDES: dict[str, dict[str, int]] = {"two stages": {}}

# lengths of documents, in each 64 tokens
DOCUMENTS = [13, 3, 0, 1, 30, 17]


def documents(kind: str, length: int) -> dict[str, torch.Tensor]:
    """Arguments of a layer, those of whole rows: "" for none."""
    lengths = torch.tensor(DOCUMENTS * (length // 64))
    if kind == "segment_ids":
        ids = torch.arange(len(lengths)).repeat_interleave(lengths)
        return dict(segment_ids=torch.stack((ids, ids.flip(0))))
    return dict(cu_seqlens=torch.nn.functional.pad(lengths.cumsum(0), (1, 0))) if kind else {}


def check(
    name: str, mesh, dtype: torch.dtype, kind: str = "", backend: str = "auto", **changes
) -> None:
    settings, networks = CASES[name]
    torch.manual_seed(0)
    config, length = NSAConfig(**SHAPE | settings | changes), 32 * mesh.size()
    bounds, rows = documents(kind, length), 1 if kind == "cu_seqlens" else 2
    layer = SparseAttention.from_config(config, **networks).to(dtype)
    with torch.no_grad():
        for weight in layer.parameters():  # none at 0
            weight += 0.1 * torch.randn_like(weight)
    x, d_out = torch.randn(2, rows, length, 16, dtype=dtype)
    whole = x.clone().requires_grad_()
    expected = layer(whole, **bounds)
    expected.backward(d_out)
    gradients = {name: p.grad for name, p in layer.named_parameters()}
    layer.zero_grad()

    context_parallel(layer, mesh)
    x, d_out = context_parallel_shard(mesh, [x, d_out], [1, 1])
    if backend == "flex":  # which has no gradients on the CPU
        layer.backend = backend
        with torch.no_grad():
            (out,) = context_parallel_unshard(mesh, [layer(x, **bounds)], [1])
        return torch.testing.assert_close(out, expected, msg=lambda m: f"{name} {kind}: {m}")
    out = layer(x.requires_grad_(), **bounds)
    out.backward(d_out)
    out, d_x = context_parallel_unshard(mesh, [out, x.grad], [1, 1])
    tolerance = dict(atol=1e-12, rtol=0) if dtype == torch.float64 else dict(atol=2e-5, rtol=1e-5)
    torch.testing.assert_close(out, expected, **tolerance)
    torch.testing.assert_close(d_x, whole.grad, **tolerance)
    for weight, p in layer.named_parameters():
        assert (p.grad is None) == (gradients[weight] is None), weight
        if p.grad is not None:
            dist.all_reduce(p.grad)
            torch.testing.assert_close(p.grad, gradients[weight], **tolerance)


def check_flex(mesh) -> None:
    """flex_attention sees a chunk's documents."""
    from torch.nn.attention import flex_attention  # loads sympy

    # as the fixture untraced_flex
    flex_attention._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG = True
    for name in ("one-softmax", "not causal"):
        check(name, mesh, torch.float32, "cu_seqlens", "flex")
    check("paper, means", mesh, torch.float32, "segment_ids", "flex")


def check_block_indices(mesh) -> None:
    """Blocks of a whole sequence given to shards, and asked of them, are the same."""
    for stride, kind in ((1, ""), (4, ""), (4, "cu_seqlens")):
        bounds = documents(kind, 64)
        settings = SHAPE | ONE_SOFTMAX | dict(selection_stride=stride)
        torch.manual_seed(0)
        layer, x = SparseAttention(**settings), torch.randn(1, 64, 16)
        expected, blocks = layer(x, return_block_indices=True, **bounds)
        context_parallel(layer, mesh)
        x, shard = context_parallel_shard(mesh, [x, blocks], [1, 1])
        out, found = layer(x, return_block_indices=True, **bounds)
        again = layer(x, block_indices=shard, **bounds)
        out, found, again = context_parallel_unshard(mesh, [out, found, again], [1] * 3)
        assert torch.equal(found, blocks)
        assert torch.equal(out, again)
        torch.testing.assert_close(out, expected)


def check_ranking_loss(mesh) -> None:
    """The loss of an index at a rank's positions is that of these positions of the sequence."""
    first, last = torch.tensor([[0] * 40 + [40] * 88, [33] * 40 + [128] * 88], dtype=torch.int32)
    packed = Documents(*(bound.expand(2, -1) for bound in (first, last)))
    for settings, rows in (
        (INDEX, None), (CASES["index, rotated tokens"][0], None), (INDEX, packed)
    ):  # fmt: skip
        torch.manual_seed(0)
        layer, x = SparseAttention(**SHAPE | settings).double(), torch.randn(2, 128, 16).double()
        own, shard = context_parallel_shard(mesh, [torch.arange(128), x], [0, 1])
        expected = layer(x, documents=rows, ranking_queries=own)[1]
        expected.backward()
        gradient = layer.to_index.weight.grad
        dist.all_reduce(gradient)
        layer.zero_grad()
        context_parallel(layer, mesh)
        if rows is not None:
            rows = Documents(*context_parallel_shard(mesh, rows, [1, 1]))
        loss = layer(shard, documents=rows, ranking_queries=torch.arange(len(own)))[1]
        loss.backward()
        dist.all_reduce(layer.to_index.weight.grad)
        assert expected > 0
        torch.testing.assert_close(loss, expected)
        torch.testing.assert_close(layer.to_index.weight.grad, gradient)


def check_refused(mesh) -> None:
    layer = context_parallel(SparseAttention(**SHAPE, **SHORT), mesh)
    index = context_parallel(SparseAttention(**SHAPE | INDEX), mesh)
    x, mask = torch.randn(1, 16, 16), torch.ones(1, 16).bool()
    layout = dict(cu_seqlens=torch.tensor([0, 16 * mesh.size()]))
    documents = Documents(*torch.zeros(2, 1, 16).int())
    odd = [torch.ones(3, dtype=torch.long)], [0]
    for words, call in (
        ("cache must be", lambda: layer(x, cache=KVCache())),
        ("mask must be", lambda: layer(x, mask=mask)),
        ("fine_selection_flex_mask must be", lambda: layer(x, fine_selection_flex_mask=print)),
        ("must have two chunks", lambda: layer(x[:, :0], segment_ids=x[:, :0, 0].int())),
        ("two ways to name documents", lambda: layer(x, documents=documents, **layout)),
        (
            "ranking_queries must be None with cu_seqlens",
            lambda: index(x, ranking_queries=2, **layout),
        ),
        ("a multiple of 8 tokens", lambda: layer(x[:, :12])),
        ("at least", lambda: layer(x[:, :0])),
        ("must have SparseAttention", lambda: context_parallel(torch.nn.Linear(2, 2), mesh)),
        ("mesh must be", lambda: context_parallel(layer, 2)),
        ("buffers must have a multiple of", lambda: context_parallel_shard(mesh, *odd)),
        ("buffers must have a multiple of 2", lambda: context_parallel_unshard(mesh, *odd)),
        ("buffers must be a list", lambda: context_parallel_shard(mesh, x, [1])),
        ("seq_dims must be 1 dimensions", lambda: context_parallel_shard(mesh, [x], [1, 1])),
        ("seq_dims must be an integer", lambda: context_parallel_unshard(mesh, [x], [True])),
        ("of at least -3 and below 3, got 3", lambda: context_parallel_unshard(mesh, [x], [3])),
    ):
        assert words in message(call), words


def message(call, kind: type[BaseException] = ValueError) -> str:
    """Of the error that a call raises."""
    with pytest.raises(kind) as raised:
        call()
    return str(raised.value)


def check_layers(mesh) -> None:
    if mesh.size() > 2:
        for name in [*CASES][::4]:
            check(name, mesh, torch.float64, "cu_seqlens", **STRIDES.get(name, STRIDE))
        return
    for name in CASES:
        check(name, mesh, torch.float64)
        check(name, mesh, torch.float64, "segment_ids")
        check(name, mesh, torch.float64, "cu_seqlens", **STRIDES.get(name, STRIDE))
    check("one-softmax", mesh, torch.float32, selection_stride=4)
    check_flex(mesh)
    check_block_indices(mesh)
    check_ranking_loss(mesh)
    check_refused(mesh)
