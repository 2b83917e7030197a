"""The processes of a run under torchrun: a mesh, what each of them reads, and one that writes."""

from __future__ import annotations

import datetime
import math
import os
import socket
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from native_sparse_attention import Transformer

from .errors import UserError, reason
from .options import option

DIMENSIONS = ("dp", "cp", "tp")
# seconds that a process waits for the others in a collective
TIMEOUT = 600
# what processes may have of their own
OWN = {"device", "threads"}


def is_first() -> bool:
    """Whether this process prints and writes."""
    return not is_parallel() or dist.get_rank() == 0


def is_parallel() -> bool:
    return dist.is_available() and dist.is_initialized()


def start(given: Namespace) -> None:
    """Join the other processes of torchrun. All but the first print nothing."""
    if os.environ.get("OMPI_COMM_WORLD_SIZE", "1") != "1" and "WORLD_SIZE" not in os.environ:
        raise UserError("several processes of mpirun are not supported: start torchrun")
    world = int(os.environ.get("WORLD_SIZE", "1"))
    sizes = {name: getattr(given, name, 1) for name in DIMENSIONS}
    if "dp" not in given:
        sizes["dp"] = max(1, world // (sizes["cp"] * sizes["tp"]))
    if math.prod(sizes.values()) != world:
        asked = " x ".join(f"--{name} {size}" for name, size in sizes.items())
        raise UserError(f"{asked} is not the number of processes, {world}: start torchrun with it")
    if world == 1:
        return
    for name in ("sample", "view"):
        if name in given:
            raise UserError(f"--{name} needs one process, got {world}")
    if "RANK" not in os.environ:
        raise UserError(f"the environment has WORLD_SIZE={world} without RANK: start torchrun")
    given.dp = sizes["dp"]
    on_gpu = torch.cuda.is_available() and not getattr(given, "device", "cuda").startswith("cpu")
    if on_gpu:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        given.device = f"cuda:{os.environ['LOCAL_RANK']}"
    store = None
    shares_store = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if shares_store and os.environ["GROUP_WORLD_SIZE"] == "1":
        # torchrun's own store outlives a restart, with the addresses of processes that have ended
        agent = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        store = dist.PrefixStore(os.environ["TORCHELASTIC_RESTART_COUNT"], dist.TCPStore(*agent))
    dist.init_process_group(
        "nccl" if on_gpu else "gloo",
        store=store, rank=int(os.environ["RANK"]), world_size=world, timeout=patience(given),
    )  # fmt: skip
    if not is_first():
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115


def patience(given: Namespace) -> datetime.timedelta:
    return datetime.timedelta(seconds=getattr(given, "timeout", TIMEOUT))


def launch() -> str:
    """Names the torchrun that started this process, also after a restart; "" without one."""
    if (name := os.environ.get("TORCHELASTIC_RUN_ID")) is None:
        return ""
    return f"torchrun {name} as process {os.getppid()} on {socket.gethostname()}"


def from_first(call: Callable[[], Any]) -> Any:
    """What `call` returns in the first process, which alone runs it."""
    result = [call() if is_first() else None]
    if is_parallel():
        dist.broadcast_object_list(result)
    return result[0]


def check_same(given: Namespace, cfg: Namespace) -> None:
    """Raise a UserError in all processes where they were started with different settings."""
    if not is_parallel():
        return
    own = {name: value for name, value in vars(cfg).items() if name not in OWN}
    own |= {name: getattr(given, name, 1) for name in DIMENSIONS}
    own["resume"] = str(getattr(given, "resume", ""))
    settings: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(settings, own)
    for rank, others in enumerate(settings):
        for name in sorted(own):
            if others[name] != settings[0][name]:
                raise UserError(
                    f"{option(name)} is {others[name]} in rank {rank} and {settings[0][name]} in "
                    "rank 0: start all processes with the same options and data"
                )


@contextmanager
def named_failures(progress: Mapping[str, int]) -> Iterator[None]:
    """Tell which process failed, and at which step: torchrun then ends all others."""
    try:
        yield
    except Exception as error:
        if is_parallel() and not isinstance(error, UserError):
            place = f"rank {dist.get_rank()} failed at step {progress.get('step', 0)}"
            print(f"train_enwik8.py: {place}: {reason(error)}", file=sys.stderr, flush=True)
        raise


def parallel(model: Transformer, given: Namespace, cfg: Namespace) -> Callable[..., Tensor]:
    """Distribute a model. The function that it returns maps a whole batch ids [b, n + 1], the same
    in every process, to this process' loss of it: their mean is that over the predictions."""
    from torch.distributed.device_mesh import DeviceMesh

    from native_sparse_attention.distributed import context_parallel_shard, parallelize
    from native_sparse_attention.transformer import NO_LABEL

    sizes = {name: getattr(given, name, 1) for name in DIMENSIONS}
    dp, cp = sizes["dp"], sizes["cp"]
    if cfg.attention == "dense":
        raise UserError(f"--attention dense needs one process, got {math.prod(sizes.values())}")
    if cfg.batch_size % dp:
        raise UserError(f"--batch-size {cfg.batch_size} must be a multiple of --dp {dp}")
    d = cfg.compress_block_sliding_stride
    step = 2 * cp * math.lcm(d, cfg.selection_stride)
    # a window may begin in the chunk before, not before that one
    least = 0 if cfg.pack else 2 * cp * d * (math.ceil(cfg.compress_block_size / d) - 1)
    if cp > 1 and (cfg.seq_len % step or cfg.seq_len < least):
        expected = f"a multiple of {step} with --cp {cp}, at least {max(step, least)}"
        raise UserError(f"--seq-len {cfg.seq_len} must be {expected}")
    device = torch.device(cfg.device).type
    all_ranks = torch.arange(dist.get_world_size()).view(*sizes.values())
    groups = [  # init_device_mesh makes groups that wait 30 minutes over gloo
        dist.new_subgroups_by_enumeration(
            all_ranks.movedim(dim, -1).flatten(0, -2).tolist(), timeout=patience(given)
        )[0]
        for dim in range(len(DIMENSIONS))
    ]
    mesh = DeviceMesh.from_group(groups, device, all_ranks, mesh_dim_names=DIMENSIONS)
    compile = cfg.compile == "on" or (cfg.compile == "auto" and device == "cuda" and not cfg.pack)
    try:
        parallelize(model, mesh, compile=compile)
    except ValueError as error:
        raise UserError(str(error)) from None
    dp_rank = mesh["dp"].get_local_rank()

    def forward(
        ids: Tensor, return_loss: bool = True, segment_ids: Tensor | None = None
    ) -> Tensor:  # fmt: skip
        labels, documents = ids[:, 1:], {}
        if segment_ids is not None:
            begins = segment_ids[:, 1:] != segment_ids[:, :-1]
            labels = labels.masked_fill(begins.to(ids.device), NO_LABEL)
            documents["segment_ids"] = segment_ids[:, :-1].chunk(dp)[dp_rank]
        rows = [x.chunk(dp)[dp_rank] for x in (ids[:, :-1], labels)]
        ids, targets = context_parallel_shard(mesh["cp"], rows, [1, 1])
        logits = model(ids, **documents).flatten(0, 1).float()
        loss = F.cross_entropy(logits, targets.flatten(), ignore_index=NO_LABEL, reduction="sum")
        # over the predictions of all processes, for the mean of whose losses FSDP learns
        return loss * dp * cp / (labels != NO_LABEL).sum().clamp(min=1)

    return forward


def mean(value: Tensor) -> Tensor:
    """The mean over all processes."""
    if not is_parallel():
        return value
    value = value.clone()
    dist.all_reduce(value)
    return value / dist.get_world_size()


def agree(flag: bool, device: str) -> bool:
    """Whether the flag is set in any process."""
    return mean(torch.tensor(float(flag), device=device)).item() > 0 if is_parallel() else flag


def wait() -> None:
    """Wait for all processes."""
    if is_parallel():
        dist.barrier()


def stop() -> None:
    if is_parallel():
        dist.destroy_process_group()


def in_turn(call: Callable[[], Any]) -> Any:
    """What `call` returns, which the first process runs before the others."""
    result = call() if is_first() else None
    wait()
    return result if is_first() else call()


def whole(tensor: Tensor) -> Tensor:
    """A tensor that is sharded over processes, in each of them."""
    full: Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return full


def load(model: Transformer, weights: dict[str, Tensor]) -> None:
    """Load whole weights, which every process has read: in one order, as they share them out."""
    if not is_parallel():
        model.load_state_dict(weights)
        return
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

    weights = dict(sorted(weights.items()))
    set_model_state_dict(model, weights, options=StateDictOptions(full_state_dict=True))


def load_optimizer(
    model: Transformer, optimizer: torch.optim.Optimizer, state: Mapping[str, Any]
) -> None:
    """Load the whole state of an optimizer, by names of parameters."""
    from torch.distributed.checkpoint import state_dict as states

    ordered = {name: dict(sorted(state[name].items())) for name in sorted(state)}
    groups = states.get_optimizer_state_dict(model, optimizer)["param_groups"]
    states.set_optimizer_state_dict(
        model, optimizer, {"state": ordered, "param_groups": groups},
        options=states.StateDictOptions(full_state_dict=True),
    )  # fmt: skip
