"""The kernels that write new tokens to a KV cache, which load triton at their first use."""

from __future__ import annotations

from typing import Any


def kernels() -> Any:
    """The module of the kernels. They read sequence lengths on the device."""
    from ...kernels.decode import kv_cache

    return kv_cache
