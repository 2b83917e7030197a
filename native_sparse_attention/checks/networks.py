"""Checks of networks that a user gives a layer (kind and widths), and of a layer's input."""

from __future__ import annotations

import re
import warnings
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from .tensors import FLOAT_DTYPES, shown

# error messages of torch and einops for an input of the wrong width
WIDTH = re.compile(
    r"cannot be multiplied|reduction dim|einsum|subscript|broadcast|size of tensor|einops|einx|"
    r"normalized_shape|invalid for input of size|expected input|to have .* channels|h \* d = dim",
    re.IGNORECASE,
)


def check_input(inp: Any, dim: int, linear: Any, name: str = "inp") -> None:
    """Check an input [b, n, dim] with the dtype and device of the layer's weights. Weights of a
    wrapper that shards or moves them are not compared."""
    if not isinstance(inp, Tensor) or inp.dtype not in FLOAT_DTYPES:
        got = inp.dtype if isinstance(inp, Tensor) else type(inp).__name__
        raise ValueError(f"{name} must be a tensor of floating dtype, got {got}")
    if inp.ndim != 3 or inp.shape[-1] != dim:
        raise ValueError(f"{name} must have shape [b, n, {dim}], got {list(inp.shape)}")
    if inp.layout != torch.strided:
        raise ValueError(f"{name} must be a dense tensor, got one of layout {inp.layout}")
    weight = getattr(linear, "weight", None)
    if type(weight) is not nn.Parameter or weight.is_meta or linear._forward_pre_hooks:
        return
    if inp.device != weight.device:
        raise ValueError(f"{name} must be on {weight.device} as the layer is, got {inp.device}")
    if inp.dtype == weight.dtype or weight.dtype not in FLOAT_DTYPES:
        return
    if not torch.is_autocast_enabled(inp.device.type):
        raise ValueError(
            f"{name} must be {weight.dtype} as the layer is, got {inp.dtype}: cast one of the two, "
            "or use torch.autocast"
        )


def check_model(model: Any) -> None:
    if not isinstance(model, nn.Module):
        raise ValueError(f"model must be an nn.Module, got {shown(model)}")


def check_network(name: str, network: Any, given: str, wanted: str, *shapes: list[int]) -> None:
    """Check that a module maps `shapes[0]` to `shapes[1]`, with a copy on the meta device.

    Raises:
        ValueError: not a module, or a module of other widths.
    """
    if not isinstance(network, nn.Module):
        hint = ""
        if isinstance(network, type) and issubclass(network, nn.Module):
            hint = ": give an instance of it"
        raise ValueError(f"{name} must be a torch.nn.Module, got {shown(network)}{hint}")
    told = f"{name} must map [{given}] to [{wanted}], here {shapes[0]} to {shapes[1]}"
    try:
        out = on_meta(network, shapes[0])
    except Exception as error:
        # a network may not run on meta tensors; then its first call reports errors
        if WIDTH.search(f"{type(error).__module__} {error}"):
            reason = str(error).strip().splitlines()[0]
            raise ValueError(f"{told}, got {type(network).__name__}: {reason}") from None
        return
    if isinstance(out, Tensor) and list(out.shape) == shapes[1]:
        return
    if out is not None:
        got = list(out.shape) if isinstance(out, Tensor) else shown(out)
        raise ValueError(f"{told}, got {got} from {type(network).__name__}")


def copied(network: Any) -> Any:
    """A deep copy. Copies of fake tensors keep their mode; deepcopy alone would copy the mode."""
    tensors = network.parameters() if isinstance(network, nn.Module) else ()
    modes = {id(mode): mode for t in tensors if (mode := getattr(t, "fake_mode", None)) is not None}
    return deepcopy(network, modes)


def on_meta(network: nn.Module, shape: list[int]) -> Any:
    """The output of a copy of the network on meta tensors; None if it is not run."""
    compiled = (torch.jit.ScriptModule, torch._dynamo.OptimizedModule)
    if any(isinstance(module, compiled) for module in network.modules()):
        return None
    parameters = list(network.parameters())
    if any(map(is_lazy, parameters)):
        return None
    dtype = next((p.dtype for p in parameters if p.is_floating_point()), torch.float32)
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        copy = copied(network).to("meta").eval()
        return copy(torch.empty(shape, dtype=dtype, device="meta"))


def check_compress_mlp(
    network: Any, kv_heads: int, l: int, dim_head: int, is_trained: bool
) -> None:
    """Check a network `[b h w l d] -> [b h w d]`. Unless `is_trained`, gradients do not reach
    it."""
    shapes = [1, kv_heads, 1, l, dim_head], [1, kv_heads, 1, dim_head]
    check_network("compress_mlp", network, "b h w l d", "b h w d", *shapes)
    if not is_trained and any(p.requires_grad for p in network.parameters()):
        raise ValueError(
            "compress_mlp must have no parameters to train where compressed keys only rank blocks "
            "and use_diff_topk=False, since no gradient reaches them: give MeanPool() or freeze it"
        )


def check_gate(network: Any, dim: int, heads: int, branches: int) -> None:
    """Check a network `[.. dim] -> [.. branches heads]`."""
    shapes = [1, 1, dim], [1, 1, branches * heads]
    name = f"b n {branches}*heads"
    check_network("strategy_combine_mlp", network, "b n dim", name, *shapes)
