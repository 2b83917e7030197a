"""What only the user can put right."""

from __future__ import annotations


class UserError(ValueError):
    """Told in one line, exit status 2."""


class RunError(UserError):
    """A file of a run differs from the written file; the message names it."""


def reason(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:200]
