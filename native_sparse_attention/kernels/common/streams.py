"""Launches beside each other: where programs of one kernel leave part of a GPU idle, at its end or
while they wait for memory, those of another run."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any

import torch

# who writes down how streams wait for one another
listener: ContextVar[Any] = ContextVar("listener", default=None)


@functools.cache
def second(device: int, _first: int, ahead: bool) -> torch.cuda.Stream:
    """The stream that runs beside another: always the same one, as memory belongs to streams."""
    return torch.cuda.Stream(device, priority=-1 if ahead else 0)


@contextmanager
def forked(device: torch.device, ahead: bool = False) -> Iterator[AbstractContextManager[object]]:
    """Gives a context. What is launched within that runs beside what is launched outside of it, or
    `ahead` of that where there is room for one of both; at the end both are waited for, on the GPU.

    Tensors that are allocated within it must not be needed after the end."""
    if device.type != "cuda":
        yield nullcontext()
        return
    first = torch.cuda.current_stream(device)
    beside = second(first.device_index, first.cuda_stream, ahead)
    beside.wait_stream(first)
    heard = listener.get()
    if heard is not None:
        heard.forked(beside, ahead)
    try:
        yield torch.cuda.stream(beside)
    finally:
        first.wait_stream(beside)
        if heard is not None:
            heard.waits(first.cuda_stream, beside.cuda_stream)


def mark(device: torch.device) -> torch.cuda.Event | None:
    """What has been launched so far, for another stream to wait for."""
    if device.type != "cuda":
        return None
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(device))
    if listener.get() is not None:
        listener.get().marked(event)
    return event


def wait(device: torch.device, event: torch.cuda.Event | None) -> None:
    """What is launched from here on waits for what was marked."""
    if event is not None:
        torch.cuda.current_stream(device).wait_event(event)
        if listener.get() is not None:
            listener.get().awaited(event)
