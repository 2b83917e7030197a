"""Checks of networks that a user gives a layer (kind and widths), and of a layer's input."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn

from .tensors import FLOAT_DTYPES, shown


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


def copied(network: Any) -> Any:
    """A deep copy. Copies of fake tensors keep their mode; deepcopy alone would copy the mode."""
    tensors = network.parameters() if isinstance(network, nn.Module) else ()
    modes = {id(mode): mode for t in tensors if (mode := getattr(t, "fake_mode", None)) is not None}
    return deepcopy(network, modes)


def check_network(name: str, network: Any, in_axes: str, out_axes: str, *shapes: list[int]) -> None:
    """Check that a module maps `shapes[0]` to `shapes[1]`, by a copy in eval mode on zeros.

    Raises:
        ValueError: not a module, or a module that does not map them.
    """
    if not isinstance(network, nn.Module):
        hint = ""
        if isinstance(network, type) and issubclass(network, nn.Module):
            hint = ": give an instance of it"
        raise ValueError(f"{name} must be a torch.nn.Module, got {shown(network)}{hint}")
    # not the compiled form of torch.compile, which would compile it for this shape
    network = getattr(network, "_orig_mod", network)
    weight = next((p for p in network.parameters() if p.is_floating_point()), torch.empty(0))
    expected = f"{name} must map [{in_axes}] to [{out_axes}], here {shapes[0]} to {shapes[1]}"
    try:
        with torch.no_grad():
            zeros = torch.zeros(shapes[0], dtype=weight.dtype, device=weight.device)
            out = copied(network).eval()(zeros)
    except Exception as error:
        if weight.is_meta:  # it may need values
            return
        reason = str(error).strip().partition("\n")[0]
        raise ValueError(f"{expected}, got {type(network).__name__}: {reason}") from error
    if not isinstance(out, Tensor) or list(out.shape) != shapes[1]:
        got = list(out.shape) if isinstance(out, Tensor) else shown(out)
        raise ValueError(f"{expected}, got {got} from {type(network).__name__}")


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
