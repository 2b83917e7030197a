"""Run by torchrun: a step of a wrapped model equals the plain model's on the whole batch."""

import os

import torch
import torch.distributed as dist

from native_sparse_attention import Transformer
from native_sparse_attention.compress import AttentionPool

SPARSE = dict(
    sliding_window_size=8,
    compress_block_size=8,
    compress_block_sliding_stride=4,
    selection_block_size=8,
    num_selected_blocks=2,
    use_diff_topk=True,
)


def build() -> Transformer:
    torch.manual_seed(0)
    return Transformer(
        64, 32, 2, dim_head=8, heads=4, kv_heads=2, use_sparse_attn=True, sparse_attn_kwargs=SPARSE
    )


def step(model, ids):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss = model(ids, return_loss=True)
    loss.backward()
    optimizer.step()


def check(wrapper: str) -> None:
    rank = dist.get_rank()
    ids = torch.randint(0, 64, (4, 41), generator=torch.Generator().manual_seed(1))

    plain = build()
    step(plain, ids)

    model = build()
    if wrapper == "ddp":
        wrapped = torch.nn.parallel.DistributedDataParallel(model)
        step(wrapped, ids[rank * 2 : rank * 2 + 2])
        weights = dict(model.named_parameters())
    else:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import FSDPModule, fully_shard

        mesh = init_device_mesh("cpu", (2,))
        for block in model.layers:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        for module in model.modules():
            if isinstance(module, FSDPModule):
                # torch 2.8 forgets to divide by the number of processes over gloo
                module.set_force_sum_reduction_for_comms(True)
        step(model, ids[rank * 2 : rank * 2 + 2])
        weights = {name: p.full_tensor() for name, p in model.named_parameters()}

    for name, expected in plain.named_parameters():
        torch.testing.assert_close(weights[name], expected, atol=1e-6, rtol=1e-5)
    print(f"{wrapper} equals one process", flush=True)


def check_deferred(network: torch.nn.Module | None) -> None:
    """FSDP2 of a model made on the meta device: starts, and a gradient for every parameter."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    kwargs = dict(SPARSE, compress_mlp=network, num_compressed_mem_kv=0)
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
    assert torch.equal(layer.rotary_emb.freqs, build().layers[0][0].rotary_emb.freqs)
    model(torch.zeros(2, 41, dtype=torch.long), return_loss=True).backward()
    assert all(p.grad is not None for p in model.parameters())
    print("deferred starts", flush=True)


def check_context_parallel() -> None:
    """torch's own replaces SDPA alone: refused, since a shard would attend to itself."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.experimental import context_parallel

    layer, x = build().layers[0][0], torch.randn(2, 64, 32)
    with context_parallel(init_device_mesh("cpu", (2,)), buffers=[x], buffer_seq_dims=[1]):
        try:
            layer(x)
        except NotImplementedError as error:
            print(error, flush=True)
    assert layer(x).shape == (2, 64, 32)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    for wrapper in ("ddp", "fsdp"):
        check(wrapper)
    for network in (AttentionPool(8, 8), None):
        check_deferred(network)
    check_context_parallel()
    dist.barrier()
    dist.destroy_process_group()
    # threads of gloo may still let go of tensors, for which an interpreter that ends aborts
    os._exit(0)
