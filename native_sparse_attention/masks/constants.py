"""Integers that a mod carries, for torch's compiler.

One that a closure holds becomes symbolic with its second value, which flex_attention cannot
compile. The default of a parameter stays a constant; but torch before 2.12 looks at a function's
code alone to tell whether it has compiled it, and takes the graph of another default for it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from types import CodeType, FunctionType
from typing import Any, TypeVar, cast

import torch

Mod = TypeVar("Mod", bound=Callable[..., Any])


# for ever: torch tells a code by its address
@cache
def code_with(code: CodeType, defaults: tuple[int, ...]) -> CodeType:
    """A copy of `code` for these defaults, the same one whenever they come again."""
    return code.replace(co_name=f"{code.co_name}_{'_'.join(map(str, defaults))}")


def constant_defaults(mod: Mod) -> Mod:
    """Decorates a mod whose integers are defaults of its parameters: it is compiled anew for other
    integers, and not for the same."""
    if torch.compiler.is_compiling():  # a mod made in the graph is part of it
        return mod
    function = cast(FunctionType, mod)
    function.__code__ = code_with(function.__code__, function.__defaults__ or ())
    return mod
