"""Launches beside each other: what runs when."""

import pytest
import torch

from native_sparse_attention.kernels.common import streams

CYCLES = 20_000_000


@pytest.mark.gpu
@pytest.mark.parametrize("own_stream", (False, True))
def test_waits_at_both_ends(own_stream):
    """What is launched within sees what was launched before, and what is launched after the end
    sees it, with no wait of the host."""
    device = torch.device("cuda", torch.cuda.current_device())
    with torch.cuda.stream(torch.cuda.Stream() if own_stream else torch.cuda.current_stream()):
        first = torch.cuda.current_stream()
        x, y = (torch.zeros(1 << 20, device=device) for _ in range(2))
        torch.cuda._sleep(CYCLES)
        x.fill_(1.0)
        with streams.forked(device) as beside:
            with beside:
                assert torch.cuda.current_stream() != first
                torch.cuda._sleep(CYCLES)
                y.copy_(x)
            x.mul_(1.0)
        y += 1.0
    torch.cuda.synchronize()
    assert (y == 2.0).all()
