"""Triton's interpreter without what takes most of its time; what it computes is the same. Releases
of Triton without the names here just take longer."""

from __future__ import annotations

from typing import Any

import numpy as np

# what the library has in place of what `hasten` sets
OWN: dict[str, Any] = {}


def hasten() -> None:
    from triton.language import standard
    from triton.runtime import interpreter

    if hasattr(interpreter, "ReduceOps") and hasattr(standard, "_xor_combine"):
        sort_in_numpy(interpreter.ReduceOps, standard._xor_combine)
    if hasattr(interpreter, "GridExecutor") and hasattr(interpreter, "_patch_lang"):
        patch_once_a_launch(interpreter)
    # an operation takes as long for many elements as for few
    from native_sparse_attention.kernels import inverse

    OWN.setdefault("NUMBERED", inverse.NUMBERED)
    inverse.NUMBERED = 128


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
