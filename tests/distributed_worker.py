"""Run by torchrun: a step of a wrapped model equals the plain model's on the whole batch."""

import os

import torch
import torch.distributed as dist

from native_sparse_attention import Transformer

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
        for attention, feed_forward in model.layers:
            fully_shard(attention, mesh=mesh)
            fully_shard(feed_forward, mesh=mesh)
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


if __name__ == "__main__":
    dist.init_process_group("gloo")
    for wrapper in ("ddp", "fsdp"):
        check(wrapper)
    dist.barrier()
    dist.destroy_process_group()
    # threads of gloo may still let go of tensors, for which an interpreter that ends aborts
    os._exit(0)
