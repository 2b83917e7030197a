"""Concurrent launches on a side stream: programs of one kernel run on multiprocessors that another
leaves idle, at the end of a launch or while they wait for memory."""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch


@functools.cache
def side_stream(device: int, _main: int, urgent: bool) -> torch.cuda.Stream:
    """The side stream of a stream; always the same one, as the allocator pools memory by stream."""
    return torch.cuda.Stream(device, priority=-1 if urgent else 0)


# held from a fork to the end: another thread could otherwise write to memory of the side stream
# that this one has released, while kernels on the main stream still read it
FORKING = threading.RLock()


@contextmanager
def forked(
    device: torch.device, urgent: bool = False, enabled: bool = True
) -> Iterator[AbstractContextManager[object]]:
    """Yields a context. Launches inside it go to a side stream, of higher priority with `urgent`,
    beside those outside it. At the end the current stream waits for both. Tensors allocated
    inside the context must not be used after the end."""
    if device.type != "cuda" or not enabled:
        yield nullcontext()
        return
    main = torch.cuda.current_stream(device)
    side = side_stream(main.device_index, main.cuda_stream, urgent)
    with FORKING:
        side.wait_stream(main)
        try:
            yield torch.cuda.stream(side)
        finally:
            main.wait_stream(side)


def mark(device: torch.device) -> torch.cuda.Event | None:
    """An event after all launches so far, for another stream to wait for."""
    return torch.cuda.current_stream(device).record_event() if device.type == "cuda" else None


def wait(device: torch.device, event: torch.cuda.Event | None) -> None:
    """Later launches of the current stream wait for the event of `mark`."""
    if event is not None:
        torch.cuda.current_stream(device).wait_event(event)
