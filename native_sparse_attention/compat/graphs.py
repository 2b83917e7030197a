"""What graphs of torch.compile and torch.export ask of code that they trace."""

from __future__ import annotations

import torch
from einops import rearrange

# what dynamo takes `torch.compiler.is_exporting` for in every graph
ALWAYS_EXPORTING = torch.__version__.startswith(("2.8.", "2.9.", "2.10.", "2.11."))

# einops enters a type into its registry when it first sees it. Were that inside of a graph that is
# traced, the graph's guard on the registry would fail at the next call, and it be compiled again.
for known in (torch.empty(0), torch.nn.Parameter(torch.empty(0))):
    rearrange(known, "n -> n")
del known


def is_exporting() -> bool:
    """`torch.compiler.is_exporting`, right in compiled graphs of torch before 2.12 too."""
    if ALWAYS_EXPORTING and torch.compiler.is_dynamo_compiling():
        return torch.compiler._is_exporting_flag
    return torch.compiler.is_exporting()


def free_size(size: int) -> int:
    """A size that depends on the length of a sequence, in a form that torch.export asks nothing of.

    Of a size as `length // 8` it asks, where axes are merged, what it cannot prove of every length,
    and refuses the range. The program computes this one as it runs, and nothing is asked. Elsewhere
    it is the size itself.
    """
    if not is_exporting():
        return size
    if isinstance(size, int) and not torch.compiler.is_dynamo_compiling():
        return size  # of a length that is fixed
    free: int = torch.full((), size, dtype=torch.int64, device="cpu").item()  # type: ignore[assignment]
    torch._check(free >= 0)
    return free
