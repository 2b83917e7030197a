"""Run by torchrun: a model distributed over a mesh learns as on one process."""

import functools
import importlib.util
import os
import signal
import sys
import warnings
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.experimental import context_parallel
from torch.distributed.tensor.parallel import ColwiseParallel
from torch.nn.parallel import DistributedDataParallel

from native_sparse_attention import DenseAttentionWarning, SparseAttention, Transformer
from native_sparse_attention.compress import (
    AttentionPool,
    CompressTransformer,
    ConvLinearCompress,
    GroupedMLP,
)
from native_sparse_attention.distributed import context_parallel_shard, parallelize
from native_sparse_attention.rotary import Rotary
from tests.scripts import context_parallel_worker
from tests.scripts.context_parallel_worker import check_layers, message

SHAPE = dict(dim=32, dim_head=8, heads=8, kv_heads=4, causal=True)
SIZES = context_parallel_worker.SIZES | dict(num_initial_blocks=1, selection_stride=4)
ONE_SOFTMAX = SIZES | context_parallel_worker.ONE_SOFTMAX
MEANS = SIZES | dict(branches=("selected",), selection_stride=1)
PAPER = SIZES | dict(importance="probs", branch_kv="independent", use_diff_topk=True)
INDEX = ONE_SOFTMAX | dict(importance="index", index_dim=6, rank_rotated=False)
SHORT = SIZES | dict(num_local_blocks=2)
DP, TP, CP = ({name: 2} for name in ("dp", "tp", "cp"))
EXTRAS = dict(qkv_bias=True, out_bias=True, qk_norm=True, attention_sinks=True)


def build(settings: dict, depth: int = 2, compress_mlp=None, **options) -> Transformer:
    torch.manual_seed(0)
    kwargs = SHAPE | settings
    del kwargs["dim"]
    shape = {name: kwargs.pop(name) for name in ("dim_head", "heads", "kv_heads", "causal")}
    kwargs["compress_mlp"] = compress_mlp
    options = dict(ff_expansion_factor=2) | options
    model = Transformer(
        64, 32, depth, **shape, use_sparse_attn=True, sparse_attn_kwargs=kwargs, **options
    )
    with torch.no_grad():
        for weight in model.parameters():  # none at 0
            weight += 0.1 * torch.randn_like(weight)
    return model.double()


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.randint(0, 64, (4, 129), generator=torch.Generator().manual_seed(1))
    return ids[:, :-1], ids[:, 1:]


def distribute(model, sizes: dict[str, int], rows=None, **options) -> list[torch.Tensor]:
    """Make a model parallel. Returns what a rank reads of the rows, by default a batch."""
    mesh = init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    parallelize(model, mesh, **options)
    rows = list(rows or batch())
    if "cp" in sizes:
        rows = context_parallel_shard(mesh["cp"], rows, [1] * len(rows))
    if "dp" in sizes:
        rank, size = mesh["dp"].get_local_rank(), mesh["dp"].size()
        rows = [x.chunk(size)[rank] for x in rows]
    return rows


def make_optimizer(model) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def train(model, optimizer, ids, labels, steps=1, **call) -> tuple[torch.Tensor, torch.Tensor]:
    """The mean loss of the last step over all ranks, and the norm of its gradients."""
    for _ in range(steps):
        optimizer.zero_grad()
        out = model(ids, **call)
        logits = out if isinstance(out, torch.Tensor) else out.logits
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    loss = loss.detach()
    dist.all_reduce(loss)
    return loss / dist.get_world_size(), whole(norm)


def whole(p: torch.Tensor) -> torch.Tensor:
    return p.full_tensor() if isinstance(p, DTensor) else p


def check_weights(model, expected) -> None:
    for (name, p), q in zip(expected.named_parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(whole(q), whole(p), msg=lambda m, n=name: f"{n}: {m}")


def check_model(
    name: str, make: Callable[[], torch.nn.Module], *meshes: dict[str, int], call=None, **options
) -> None:
    """A model learns over each mesh as on one process."""
    plain, call = make(), call or {}
    expected = train(plain, make_optimizer(plain), *batch(), **call)
    for sizes in meshes:
        model = make()
        rows = distribute(model, sizes, **options)
        found = train(model, make_optimizer(model), *rows, **call)
        torch.testing.assert_close(found, expected, msg=lambda m: f"{name} {sizes}: {m}")  # noqa: B023
        check_weights(model, plain)


def check(settings: dict, *meshes: dict[str, int], layers=None, **options) -> None:
    """Of a Transformer, with settings of its attention and of its layers."""
    make = functools.partial(build, settings, **(layers or {}))
    check_model("Transformer", make, *meshes, **options)


def check_wrapped() -> None:
    """In DDP, and sharded by FSDP without `parallelize`."""
    plain, rank = build(PAPER), dist.get_rank()
    expected = train(plain, make_optimizer(plain), *batch())
    for wrapper in ("DDP", "FSDP"):
        model = wrapped = build(PAPER)
        if wrapper == "DDP":
            wrapped = DistributedDataParallel(model)
        else:
            for module in (*model.layers, model):
                fully_shard(module, mesh=init_device_mesh("cpu", (2,)))
            for module in model.modules():
                if isinstance(module, FSDPModule):
                    # torch 2.8 forgets to divide by the number of processes over gloo
                    module.set_force_sum_reduction_for_comms(True)
        rows = [x.chunk(2)[rank] for x in batch()]
        torch.testing.assert_close(train(wrapped, make_optimizer(model), *rows), expected)
        check_weights(model, plain)


def check_deferred() -> None:
    """FSDP2 of a model made on the meta device: starts, and a gradient for every parameter."""
    for network in (AttentionPool(8, 8), None):
        kwargs = dict(SIZES, use_diff_topk=True, compress_mlp=network, num_compressed_mem_kv=0)
        with torch.device("meta"):
            model = Transformer(64, 32, 1, 8, 4, use_sparse_attn=True, sparse_attn_kwargs=kwargs)
        low = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
        fully_shard(model, mesh=init_device_mesh("cpu", (2,)), mp_policy=low)
        model.to_empty(device="cpu")
        for module in model.modules():
            if hasattr(module, "reset_parameters"):
                module.reset_parameters()
        layer = model.layers[0][0]
        start = torch.tensor([-2.0, -2.0, 2.0]).repeat(4)
        assert torch.equal(layer.to_strategy_combine[0].bias.full_tensor(), start)
        if network is not None:
            assert torch.equal(layer.k_compress.to_attn_logits.weight.full_tensor(), torch.eye(8))
        else:
            first = layer.k_compress[1].weight.full_tensor()
            assert torch.equal(first[:16], torch.cat((torch.eye(8), -torch.eye(8))).repeat(1, 8))
            assert (first[16:] != 0).all()
        assert all(p.full_tensor().isfinite().all() for p in model.parameters())
        assert torch.equal(layer.rotary_emb.freqs, Rotary(8).freqs)
        model(torch.zeros(2, 41, dtype=torch.long), return_loss=True).backward()
        assert all(p.grad is not None for p in model.parameters())


def check_torchs_context_parallel() -> None:
    """It replaces SDPA alone: refused, since a shard would attend to itself."""
    layer, x = SparseAttention(**SHAPE, **SIZES), torch.randn(2, 64, 32)
    with context_parallel(init_device_mesh("cpu", (2,)), buffers=[x], buffer_seq_dims=[1]):
        words = "SparseAttention does not support torch's context_parallel"
        assert words in message(lambda: layer(x), NotImplementedError)
    assert layer(x).shape == (2, 64, 32)


@torch.no_grad()
def check_decoding(settings: dict, **pages) -> None:
    """Prompts of different lengths in chunks, then tokens one by one, over a cache of a rank's
    heads."""
    plain, model = build(settings), build(settings)
    distribute(model, TP)
    ids, caches = batch()[0][:2], model.new_cache(**pages)
    logits = [model(ids[:, i:j], cache=caches) for i, j in ((0, 50), (50, 121), (121, 122))]
    logits.append(model(ids[:, 122:], cache=caches, lengths=[6, 4]))
    whole, found = plain(ids), torch.cat(logits, dim=1)
    torch.testing.assert_close(found[0], whole[0])
    torch.testing.assert_close(found[1, :126], whole[1, :126])
    one = plain.new_cache(**pages)
    plain(ids, cache=one)
    assert caches[0].lengths == [128, 126]
    assert caches[0].memory()["k"] == one[0].memory()["k"] / 2
    args = ids[:, :40], 50, 0.0
    assert torch.equal(model.sample(*args), plain.sample(*args))
    other = message(lambda: model(ids, cache=caches[::-1]))
    assert "cache holds tokens of another layer" in other


def check_block_indices() -> None:
    """Blocks are those of all heads, given and returned; as many KV heads as a rank has heads."""
    x = torch.randn(2, 64, 32, generator=torch.Generator().manual_seed(1))
    for changes in ({}, dict(query_heads_share_selected_kv=False)):
        torch.manual_seed(0)
        layer = SparseAttention(**SHAPE, **ONE_SOFTMAX | changes)
        expected, blocks = layer(x, return_block_indices=True)
        others = blocks[:, :, :4].flip(2)
        replayed = [layer(x, block_indices=given) for given in (blocks, others, blocks[:, :, :1])]
        distribute(layer, TP, rows=[x])
        out, found = layer(x, return_block_indices=True)
        assert torch.equal(found, blocks)
        torch.testing.assert_close(out, expected)
        for given, result in zip((blocks, others, blocks[:, :, :1]), replayed, strict=True):
            torch.testing.assert_close(layer(x, block_indices=given), result)
        wrong = message(lambda: layer(x, block_indices=blocks[:, :, :2]))  # noqa: B023
        assert "block_indices must have shape [2, 64, one of [1, 4, 8], slots]" in wrong


def build_own_model() -> torch.nn.Module:
    torch.manual_seed(0)
    modules = dict(
        enter=torch.nn.Embedding(64, 32),
        attention=SparseAttention(**SHAPE, **SHORT),
        leave=torch.nn.Linear(32, 64),
    )
    return torch.nn.Sequential(OrderedDict(modules)).double()


def check_own_model() -> None:
    """A layer among modules that the library does not know."""
    plain = build_own_model()
    expected = train(plain, make_optimizer(plain), *batch())
    split = {name: ColwiseParallel(output_layouts=Replicate()) for name in ("enter", "leave")}
    for sizes, options in (TP, dict(tp_plan=split)), (CP, {}):
        model = build_own_model()
        rows = distribute(model, sizes, blocks=[model.attention], **options)
        torch.testing.assert_close(train(model, make_optimizer(model), *rows), expected)
        check_weights(model, plain)


class KilledWriter(dcp.FileSystemWriter):
    """Its second process dies once its tensors are written, before it can say so."""

    def write_data(self, *args):
        written = super().write_data(*args)
        if dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return written


def check_checkpoint(folder: Path, is_restart: bool) -> None:
    """Saved by two data-parallel ranks while they learn on, resumed by two tensor-parallel ranks
    and by one process. A rank is killed in the second save, and torchrun restarts both."""

    def state(model, optimizer):
        weights, moments = get_state_dict(model, optimizer)
        return {"model": weights, "optimizer": moments}

    def start(sizes):
        model = build(SHORT | EXTRAS)
        rows = distribute(model, sizes) if sizes else batch()
        return model, make_optimizer(model), rows

    if not is_restart:
        model, optimizer, rows = start(DP)
        group = dist.new_group()  # the model's own collectives go on meanwhile
        for step, writer in enumerate((dcp.FileSystemWriter, KilledWriter)):
            train(model, optimizer, *rows)
            target = dict(storage_writer=writer(folder / str(step)), process_group=group)
            saving = dcp.async_save(state(model, optimizer), **target)
            train(model, optimizer, *rows)
            saving.result()

    complete = [path.parent.name for path in folder.glob("*/.metadata")]
    assert complete == ["0"] and list(folder.glob("1/*.distcp"))
    message(lambda: dcp.load({}, checkpoint_id=folder / "1"), CheckpointException)
    plain, optimizer, rows = start({})
    train(plain, optimizer, *rows)
    expected = train(plain, optimizer, *rows)
    for sizes in (TP, {}):
        resumed, optimizer, rows = start(sizes)
        loaded = state(resumed, optimizer)
        dcp.load(loaded, checkpoint_id=folder / "0", no_dist=not sizes)
        weights, moments = loaded["model"], loaded["optimizer"]
        set_state_dict(resumed, optimizer, model_state_dict=weights, optim_state_dict=moments)
        torch.testing.assert_close(train(resumed, optimizer, *rows), expected)
        check_weights(resumed, plain)


def check_refused(mesh) -> None:
    def refuse(model, **options) -> str:
        return message(lambda: parallelize(model, mesh, **options))

    one_head = Transformer(64, 32, 1, 8, 4, 1, config="one-softmax")
    assert "kv_heads must be a multiple of the 2" in refuse(one_head)
    mixes = CompressTransformer(1, 32, 4)
    assert "does not mix heads" in refuse(build(SHORT, compress_mlp=mixes))
    assert "ff_expansion_factor must" in refuse(build(SHORT, ff_expansion_factor=1.04))
    assert "mp_policy needs dp or cp" in refuse(build(SHORT), mp_policy=MixedPrecisionPolicy())
    for name, value in dict(compile="on", tp_plan=[], blocks=["0"], mp_policy=torch.half).items():
        assert f"{name} must be" in refuse(build(SHORT), **{name: value})
    layer = build(SHORT).layers[0][0]
    assert "goes with a Transformer" in refuse(layer, activation_checkpointing=True)
    gate = torch.nn.Sequential(torch.nn.Linear(32, 24))
    layer = SparseAttention(**SHAPE, **SHORT, strategy_combine_mlp=gate)
    assert "strategy_combine_mlp must" in refuse(layer)
    assert "layers of SparseAttention" in refuse(parallelize(build(SHORT), mesh))
    layer = parallelize(SparseAttention(**SHAPE, **INDEX), mesh)
    x = torch.randn(1, 32, 32)
    refused = message(lambda: layer(x, ranking_queries=2))
    assert refused.startswith("ranking_queries must be None under tensor parallelism, got")
    cp, pp = (init_device_mesh("cpu", (2,), mesh_dim_names=(name,)) for name in ("cp", "pp"))
    assert "mesh must have dimensions" in message(lambda: parallelize(build(SHORT), pp))
    assert "tp_plan needs tp" in message(lambda: parallelize(build(SHORT), cp, tp_plan={}))
    model = parallelize(build(SHORT), cp)
    assert "return_loss must be False" in message(lambda: model(batch()[0], return_loss=True))


if __name__ == "__main__":
    warnings.simplefilter("ignore", DenseAttentionWarning)
    dist.init_process_group("gloo")
    segment_ids = torch.arange(128).gt(torch.tensor([[20], [51], [64], [99]])).int()
    packed = dict(segment_ids=segment_ids)
    if dist.get_world_size() == 2:
        restarts = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
        check_checkpoint(Path(sys.argv[1]), is_restart=restarts > 0)
        check(ONE_SOFTMAX, DP, TP, CP, layers=dict(share_ranking=[0]), call=dict(steps=2))
        check(PAPER | EXTRAS, DP, TP, CP, layers=dict(depth=1))
        check(INDEX, DP, TP, CP, layers=dict(local_layers=[1]), activation_checkpointing=True)
        wide = MEANS | dict(compress_block_size=60)  # wider than a chunk
        for settings in (SHORT, wide):
            check(settings, CP, layers=dict(local_layers=[0]), call=packed)
        for network in (GroupedMLP(8, 8, 4), ConvLinearCompress(4, 8, 8), AttentionPool(8, 8)):
            check(SHORT, TP, layers=dict(depth=1, compress_mlp=network))
        for settings in (ONE_SOFTMAX, MEANS, PAPER):
            check_decoding(settings)
        check_decoding(INDEX, batch=2, max_length=128, page_size=16, num_pages=20)
        check_block_indices()
        check_own_model()
        check_wrapped()
        check_deferred()
        check_torchs_context_parallel()
        check_refused(init_device_mesh("cpu", (2,), mesh_dim_names=("tp",)))
        # DTensor of torch 2.8 does not compile with dynamic shapes
        compiled = dict(compile=dict(backend="eager", dynamic=False))
        check(ONE_SOFTMAX, dict(cp=2, tp=1), layers=dict(depth=1), **compiled)
        if importlib.util.find_spec("transformers"):
            from tests.scripts import pretrained_worker

            pretrained_worker.check_models(sys.argv[1])
    else:
        check(SHORT | EXTRAS, DP | TP, CP | TP, DP | CP, layers=dict(depth=1))
        check(PAPER, CP | TP, layers=dict(depth=1), call=packed)
    check_layers(init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("cp",))["cp"])
    dist.barrier()
    dist.destroy_process_group()
