"""What only the user can put right."""

from __future__ import annotations


class UserError(Exception):
    """Told in one line, exit status 2."""


def reason(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:200]
