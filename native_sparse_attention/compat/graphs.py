"""Compatibility with graphs of torch.compile and torch.export."""

from __future__ import annotations

import torch
from einops import rearrange

# in these versions dynamo evaluates `torch.compiler.is_exporting` to True in every graph
ALWAYS_EXPORTING = torch.__version__.startswith(("2.8.", "2.9.", "2.10.", "2.11."))

# einops registers a type at its first use. If that happened in a traced graph, the graph's guard on
# the registry would fail at the next call, and torch would compile again.
for sample in (torch.empty(0), torch.nn.Parameter(torch.empty(0))):
    rearrange(sample, "n -> n")
del sample


def is_exporting() -> bool:
    """`torch.compiler.is_exporting`, also correct in compiled graphs of torch before 2.12."""
    if ALWAYS_EXPORTING and torch.compiler.is_dynamo_compiling():
        return torch.compiler._is_exporting_flag
    return torch.compiler.is_exporting()


def free_size(size: int) -> int:
    """A size that depends on a sequence length, without guards under torch.export.

    When axes merge, torch.export must prove facts about sizes such as `length // 8`. It cannot
    prove them for every length and refuses the range. A free size is computed at run time, so
    torch.export proves nothing. Outside of torch.export it is the size itself.
    """
    if not is_exporting():
        return size
    if isinstance(size, int) and not torch.compiler.is_dynamo_compiling():
        return size  # the length is fixed
    free: int = torch.full((), size, dtype=torch.int64, device="cpu").item()  # type: ignore[assignment]
    torch._check(free >= 0)
    return free
