"""Unknown keywords of a call, with suggestions of the intended keyword."""

from __future__ import annotations

import difflib
import inspect
import re
from collections.abc import Callable, Iterable
from typing import Any

# names in other libraries, and their counterparts here
OTHER_LIBRARIES = {
    "attention_mask": "mask=, bool, True for tokens: mask=attention_mask.bool()",
    "attn_mask": "mask=, bool, True for tokens; causality is causal=True",
    "key_padding_mask": "mask=, bool, True for tokens: mask=~key_padding_mask",
    "padding_mask": "mask=, bool, True for tokens",
    "src_key_padding_mask": "mask=, bool, True for tokens: mask=~src_key_padding_mask",
    "is_causal": "causal=",
    "position_ids": "mask= or cu_seqlens=, from which positions follow",
    "past_key_values": "cache=",
    "past_key_value": "cache=",
    "use_cache": "return_cache=",
    "labels": "return_loss=True",
    "input_ids": "ids, the first argument",
    "softmax_scale": "scale=",
    "window_size": "sliding_window_size=",
    "softcap": "soft_cap=",
}


class UnexpectedKeyword(ValueError, TypeError):
    """An unknown keyword: a TypeError as in Python, and a ValueError as for other arguments."""


def check_keywords(keywords: Iterable[str], known: Iterable[str]) -> None:
    """Raise `UnexpectedKeyword` for the first unknown keyword, with a suggestion."""
    names = list(known)
    for name in keywords:
        if name in names:
            continue
        counterpart = OTHER_LIBRARIES.get(name)
        fits = counterpart is not None and re.split("[=,]", counterpart)[0] in names
        hint = f": use {counterpart}" if fits else nearest(name, names)
        raise UnexpectedKeyword(f"got an unexpected keyword argument {name!r}{hint}")


def nearest(name: Any, names: list[str]) -> str:
    """The closest known name, as the end of a message."""
    near = difflib.get_close_matches(str(name), names, n=1)
    return f": did you mean {near[0]}?" if near else ""


def refuse(unknown: dict[str, Any], forward: Callable[..., Any]) -> None:
    """`check_keywords` of the `**unknown` of a forward, which should be empty."""
    if unknown:
        check_keywords(unknown, list(inspect.signature(forward).parameters)[:-1])
