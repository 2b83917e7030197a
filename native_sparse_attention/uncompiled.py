"""A call outside of the graph that torch.compile is tracing.

`torch.compiler.disable` loads dynamo, so only code under tracing imports this module.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


@torch.compiler.disable(reason="only a KVCache with max_length runs in a compiled graph")
def call_uncompiled(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """`function` in eager mode. The graph breaks here; fullgraph=True raises the reason."""
    return function(*args, **kwargs)
