"""The problem that is timed: its settings and its random inputs."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

Tensors = dict[str, Tensor]
# blocks of a group that a first stage of ranking keeps
GROUP = 4


@dataclass(frozen=True)
class Setting:
    """One row of tokens, causal; the names of docs/semantics.md."""

    T: int
    H: int = 64
    K: int = 4
    D: int = 128
    l: int = 32
    d: int = 16
    s: int = 64
    n: int = 13
    initial: int = 1
    local: int = 2
    w: int = 511
    stride: int = 1
    groups: int = 0  # that a first stage of ranking keeps
    bits: int = 16  # of the numbers that rank
    dtype: torch.dtype = torch.bfloat16

    @property
    def G(self) -> int:
        return self.H // self.K

    @property
    def of_groups(self) -> Setting:
        """Of the first of two stages, which ranks groups of blocks."""
        counts: Any = dict(n=self.groups, initial=self.initial // GROUP, local=self.local // GROUP)
        return replace(self, s=GROUP * self.s, groups=0, **counts)

    @property
    def forced(self) -> dict[str, Any]:
        return dict(num_initial_blocks=self.initial, num_local_blocks=self.local)

    @property
    def ranking(self) -> dict[str, Any]:
        """The settings of `select_blocks`, but for the importance."""
        return dict(
            compress_block_size=self.l,
            compress_block_sliding_stride=self.d,
            selection_block_size=self.s,
            num_selected_blocks=self.n,
            selection_stride=self.stride,
            **self.forced,
            # which older commits, which `against` times, do not know
            **({"num_selected_groups": self.groups} if self.groups else {}),
            **({"ranking_bits": self.bits} if self.bits != 16 else {}),
        )

    def row(self) -> dict[str, Any]:
        fields = asdict(self)
        fields["selection_stride"] = fields.pop("stride")
        return {**fields, "G": self.G, "dtype": str(self.dtype).removeprefix("torch.")}


# inputs


def pooled(x: Tensor, l: int, d: int) -> Tensor:
    """The means of the windows `[(j + 1) d - l, (j + 1) d)` of x [b t h e], zeros before token
    0."""
    x = F.pad(x, (0, 0, 0, 0, max(0, l - d), 0)).unfold(1, l, d)
    return x.mean(-1, dtype=torch.promote_types(x.dtype, torch.float32)).to(x.dtype)


def draw(setting: Setting, names: tuple[str, ...], device: torch.device, seed: int = 0) -> Tensors:
    """Random q, k, v [1 T H|K D], the mean pooled ck, cv of k and v, branch_gates [1 T H 3], and
    the d_out [1 T H D] that the backward pass starts from: those of `names`."""
    c = setting
    generator = torch.Generator(device).manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device, dtype=c.dtype)

    shapes = {"q": (1, c.T, c.H, c.D), "k": (1, c.T, c.K, c.D), "v": (1, c.T, c.K, c.D)}
    shapes["d_out"] = (1, c.T, c.H, c.D)
    shapes["branch_gates"] = (1, c.T, c.H, 3)
    x = {name: normal(*shape) for name, shape in shapes.items()}
    x["branch_gates"] = x["branch_gates"].sigmoid()
    x |= {"ck": pooled(x["k"], c.l, c.d), "cv": pooled(x["v"], c.l, c.d)}
    return {name: x[name] for name in names}
