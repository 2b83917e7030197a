"""Triton's interpreter without what takes most of its time; what it computes is the same. Releases
of Triton without the names here just take longer."""

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
import torch

try:
    import triton

    OLD = triton.__version__.startswith("3.4.")
except ImportError:
    OLD = False
# that of Triton 3.4 launches by no `KernelInterface`, keeps tensors past a launch, and has no
# descriptors of strides that are not aligned
not_of_3_4 = pytest.mark.skipif(
    OLD and not torch.cuda.is_available(), reason="Triton's interpreter needs to be of 3.5 or later"
)

# what the library has in place of what `hasten` sets
OWN: dict[str, Any] = {}


def hasten() -> None:
    from triton.language import core, standard
    from triton.runtime import interpreter

    if hasattr(interpreter, "ReduceOps") and hasattr(standard, "_xor_combine"):
        sort_in_numpy(interpreter.ReduceOps, standard._xor_combine)
    if hasattr(interpreter, "GridExecutor") and hasattr(interpreter, "_patch_lang"):
        patch_once_a_launch(interpreter)
    if hasattr(interpreter, "interpreter_builder"):
        check_nothing_in_vain(interpreter.interpreter_builder)
    block = core.block_type(core.int32, [1])
    known = has(block, "element_ty shape numel name")
    if known and has(core.tensor(None, block), "handle shape numel type dtype"):
        share_shapes(core)
    # an operation takes as long for many elements as for few
    from native_sparse_attention.kernels.selected import key_major

    OWN.setdefault("COUNT_PAIRS", key_major.COUNT_PAIRS)
    key_major.COUNT_PAIRS = 128


def has(made: Any, names: str) -> bool:
    """These attributes and no others."""
    return vars(made).keys() == set(names.split())


def sort_in_numpy(reducer: Any, xor: Any) -> None:
    """Sorting is made of exclusive ors, for each element of which it calls a function of Python."""
    one_by_one = reducer.generic_reduce

    def reduce(self: Any, inputs: tuple[Any, ...]) -> Any:
        if self.combine_fn != xor:
            return one_by_one(self, inputs)
        (x,) = inputs
        whole = np.bitwise_xor.reduce(x.handle.data, axis=self.axis, keepdims=self.keep_dims)
        return [self.to_tensor(whole, x.dtype)]

    reducer.generic_reduce = reduce


def patch_once_a_launch(interpreter: Any) -> None:
    """For each call within a kernel it patches the language anew, as the launch has done."""
    launch, patch, patched = interpreter.GridExecutor.__call__, interpreter._patch_lang, set()

    def launch_anew(self: Any, *args: Any, **kwargs: Any) -> Any:
        patched.clear()
        return launch(self, *args, **kwargs)

    def patch_once(fn: Any) -> Any:
        # modules differ in what they know of the language
        if fn.__module__ in patched:
            return None
        patched.add(fn.__module__)
        return patch(fn)

    interpreter.GridExecutor.__call__, interpreter._patch_lang = launch_anew, patch_once


def check_nothing_in_vain(builder: Any) -> None:
    """It forms every sum of integers in 64 bits too and compares, for an assertion that is made in
    debugging alone."""
    options = getattr(builder, "options", None)
    if getattr(options, "sanitize_overflow", False) and not getattr(options, "debug", True):
        builder.options = dataclasses.replace(options, sanitize_overflow=False)


def share_shapes(core: Any) -> None:
    """Every tensor and its type have shapes of their own, of which there are few."""
    make, shapes, sizes = core.block_type.__init__, {}, {}

    def block_type(self: Any, element_ty: Any, shape: Any) -> None:
        key = tuple(core._unwrap_if_constexpr(size) for size in shape)
        if key not in shapes:
            make(self, element_ty, shape)
            shapes[key] = self.shape, self.numel, str(self.shape)
        self.element_ty = element_ty
        self.shape, self.numel, told = shapes[key]
        self.name = f"<{told}, {element_ty}>"

    def tensor(self: Any, handle: Any, type: Any) -> None:
        key = tuple(type.shape) if type.is_block() else ()
        if key not in sizes:
            shape = core.tuple([core.constexpr(size) for size in key])
            sizes[key] = shape, core.constexpr(math.prod(key))
        self.shape, self.numel = sizes[key]
        self.handle, self.type, self.dtype = handle, type, type.scalar

    core.block_type.__init__, core.tensor.__init__ = block_type, tensor
