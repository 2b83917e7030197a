"""The identity of a layer, by which a KV cache knows the layer that it belongs to."""

from __future__ import annotations

from typing import Any


class Identity:
    """The identity of one attention layer.

    A deepcopied or unpickled layer gets a new identity, because its weights may change
    independently. A module that wraps a layer shares the layer's identity.
    """

    def __deepcopy__(self, memo: dict[int, Any]) -> Identity:
        return Identity()

    def __reduce__(self) -> Any:
        return Identity, ()
