"""Integers of a mod as constants for torch's compiler.

An integer in a closure becomes symbolic at its second value, and flex_attention cannot compile
symbolic integers. A parameter's default stays constant. But torch before 2.12 looks up a compiled
graph by the function's code alone, so it would reuse the graph of another default.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from types import CodeType, FunctionType
from typing import Any, TypeVar, cast

import torch

Mod = TypeVar("Mod", bound=Callable[..., Any])


# never evicted: torch identifies a code object by its address
@cache
def code_with(code: CodeType, defaults: tuple[int, ...]) -> CodeType:
    """A copy of `code` for these defaults. The same defaults return the same copy."""
    return code.replace(co_name=f"{code.co_name}_{'_'.join(map(str, defaults))}")


def constant_defaults(mod: Mod) -> Mod:
    """Decorate a mod whose integers are parameter defaults: torch compiles it once per set of
    integers."""
    if torch.compiler.is_compiling():  # a mod made in the graph is part of it
        return mod
    function = cast(FunctionType, mod)
    function.__code__ = code_with(function.__code__, function.__defaults__ or ())
    return mod
