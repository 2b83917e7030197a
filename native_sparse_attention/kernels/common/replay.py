"""Record the launches of a call once, and replay them in later calls.

The launches of a layer's call are a function of its settings and of the shapes, strides and
alignments of its tensors. The second call with equal ones is recorded: allocations, launches,
torch operators between them, and waits between streams. Later calls replay the record with their
own tensors and plan nothing: a launch takes a tenth of the time.

A tensor is identified by its source, an input or an allocation, and by its offset in the source.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_unflatten
from triton.runtime import jit

from . import ahead, launch, streams

# plans of an operator, at most; one more drops all of them
MAX_PLANS = 256
EMPTY = ("aten::empty", "aten::new_empty", "aten::empty_like", "aten::empty_strided",
         "aten::new_empty_strided")  # fmt: skip
# whether launches of this thread are recorded; whether calls are recorded without a GPU too
recording: ContextVar[bool] = ContextVar("recording", default=False)
everywhere: ContextVar[bool] = ContextVar("everywhere", default=False)


@dataclass(frozen=True)
class View:
    """A tensor, as a view of its source."""

    source: int
    offset: int  # bytes from the begin of the source
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    def of(self, base: Tensor) -> Tensor:
        same = self.offset == 0 and self.dtype == base.dtype and self.shape == tuple(base.shape)
        if same and self.stride == base.stride():
            return base
        first = base.storage_offset() * base.element_size() + self.offset
        like = torch.empty(0, dtype=self.dtype, device=base.device)
        return like.set_(
            base.untyped_storage(), first // self.dtype.itemsize, self.shape, self.stride
        )


class OnSide:
    """What `torch.cuda.stream(side)` does, which first asks for the current stream and device."""

    def __init__(self, side: torch.cuda.Stream, main: torch.cuda.Stream) -> None:
        self.side, self.main = side, main

    def __enter__(self) -> None:
        torch.cuda.set_stream(self.side)

    def __exit__(self, *error: object) -> None:
        torch.cuda.set_stream(self.main)


class PlanStreams:
    """The streams of a plan's calls on one main stream, which take turns, and their events."""

    def __init__(self, main: torch.cuda.Stream, paths: list[tuple[bool, ...]]) -> None:
        self.streams = []
        for path in paths:
            stream = main
            for first in path:
                stream = streams.side_stream(stream.device_index, stream.cuda_stream, first)
            self.streams.append(stream)
        self.handles = [stream.cuda_stream for stream in self.streams]
        self.lock: Any = streams.lock_of(main) if len(paths) > 1 else nullcontext()
        self.contexts = [nullcontext(), *(OnSide(side, main) for side in self.streams[1:])]
        self.events: defaultdict[int, torch.cuda.Event] = defaultdict(torch.cuda.Event)

    def record(self, number: int, stream: int) -> None:
        self.events[number].record(self.streams[stream])

    def wait(self, number: int, stream: int) -> None:
        self.streams[stream].wait_event(self.events[number])


@dataclass
class State:
    """State of a replayed call: tensors by source, their addresses, and its streams."""

    bases: list[Any]
    addresses: list[int]
    gpu: Any  # a PlanStreams; None without a GPU

    def on(self, stream: int) -> Any:
        return self.gpu.contexts[stream] if self.gpu is not None else nullcontext()

    def put(self, source: int, tensor: Tensor) -> None:
        self.bases[source] = tensor
        self.addresses[source] = tensor.data_ptr()


Step = Callable[[State], None]


def begin(t: Tensor) -> int:
    """The offset of a tensor in its storage, in bytes."""
    return int(t.storage_offset()) * t.element_size()


class Address:
    """The part of a tensor that the launch of a TMA descriptor needs."""

    def __init__(self, address: int, dtype: torch.dtype) -> None:
        self.address, self.dtype = address, dtype

    def data_ptr(self) -> int:
        return self.address


def rebase(descriptor: Any, base: Any) -> Any:
    """The descriptor for another tensor, without the checks of its constructor."""
    other = object.__new__(type(descriptor))
    other.__dict__.update(descriptor.__dict__, base=base)
    return other


class Launch:
    """A recorded launch: a kernel, its grid and its arguments except tensors."""

    def __init__(
        self, runner: Any, args: list[Any], tensors: list[tuple[int, View]],
        descriptors: list[tuple[int, Any, View]], stream: int,
    ) -> None:  # fmt: skip
        self.runner, self.args, self.stream = runner, args, stream
        self.tensors, self.descriptors = tensors, descriptors
        self.pointers = [(at, view.source, view.offset) for at, view in tensors]

    def __call__(self, state: State) -> None:
        args, addresses = self.args.copy(), state.addresses
        if state.gpu is None:
            for at, view in self.tensors:
                args[at] = view.of(state.bases[view.source])
            for at, descriptor, view in self.descriptors:
                args[at] = rebase(descriptor, view.of(state.bases[view.source]))
            self.runner(*args)
            return
        for at, source, offset in self.pointers:
            args[at] = addresses[source] + offset
        for at, descriptor, view in self.descriptors:
            address = addresses[view.source] + view.offset
            args[at] = rebase(descriptor, Address(address, view.dtype))
        self.runner(*args, stream=state.gpu.handles[self.stream])


@dataclass(frozen=True)
class Plan:
    """The steps of a call, and its results as views."""

    steps: list[Step]
    sources: int
    paths: list[tuple[bool, ...]]  # of each stream: `ahead` of each fork from the current stream
    results: tuple[list[View], Any]  # and their tree structure
    made: dict[tuple[int, int], PlanStreams] = field(default_factory=dict)  # by the main stream

    def on_stream(self, main: torch.cuda.Stream) -> PlanStreams:
        key = main.device_index, main.cuda_stream
        found = self.made.get(key)
        if found is None:
            found = self.made[key] = PlanStreams(main, self.paths)
        return found

    def __call__(self, inputs: Sequence[Tensor]) -> Any:
        device = inputs[0].device
        gpu = None
        if device.type == "cuda":
            gpu = self.on_stream(torch.cuda.current_stream(device))
        rest = self.sources - len(inputs)
        addresses = [t.data_ptr() for t in inputs] + [0] * rest
        state = State([*inputs, *[None] * rest], addresses, gpu)
        with nullcontext() if gpu is None else gpu.lock:
            for step in self.steps:
                step(state)
        views, structure = self.results
        results = [view.of(state.bases[view.source]) for view in views]
        return tree_unflatten(results, structure)


class Recorder(TorchDispatchMode):
    """Records the steps of a call. `failed`: a step cannot be replayed."""

    def __init__(self, inputs: Sequence[Tensor]) -> None:
        super().__init__()
        self.steps: list[Step] = []
        self.failed = False
        self.inputs, self.sources = len(inputs), len(inputs)
        self.device = inputs[0].device
        self.known: dict[int, tuple[int, int]] = {}  # by storage: source and its offset
        self.alive: dict[int, tuple[StorageWeakRef, int]] = {}  # by source: its storage
        self.paths: list[tuple[bool, ...]] = [()]
        self.by_handle: dict[int, int] = {}
        self.events: list[Any] = []  # by number; None: of a wait for another stream
        for source, t in enumerate(inputs):
            self.known.setdefault(self.storage(t), (source, begin(t)))
        if self.device.type == "cuda":
            self.by_handle[torch.cuda.current_stream(self.device).cuda_stream] = 0

    @staticmethod
    def storage(t: Tensor) -> int:
        return t.untyped_storage().data_ptr()

    def view(self, t: Tensor) -> View:
        at = self.known.get(self.storage(t))
        if at is None:  # neither an input nor an allocation: the same tensor in all calls
            source, self.sources = self.sources, self.sources + 1
            at = self.known[self.storage(t)] = source, begin(t)
            self.steps.append(lambda state: state.put(source, t))
        return View(at[0], begin(t) - at[1], tuple(t.shape), t.stride(), t.dtype)

    def add_source(self, t: Tensor) -> int:
        """Register a new tensor as a source."""
        source, self.sources = self.sources, self.sources + 1
        self.known[self.storage(t)] = source, begin(t)
        self.alive[source] = StorageWeakRef(t.untyped_storage()), self.storage(t)
        return source

    def forget(self) -> None:
        """Release the tensors that the call has released."""
        gone = [source for source, (ref, _) in self.alive.items() if ref.expired()]
        for source in gone:
            _, storage = self.alive.pop(source)
            if self.known.get(storage, (None,))[0] == source:
                del self.known[storage]
        if gone:

            def release(state: State) -> None:
                for source in gone:
                    state.bases[source] = None

            self.steps.append(release)

    def stream(self) -> int:
        """The number of the current stream."""
        if self.device.type != "cuda":
            return 0
        number = self.by_handle.get(torch.cuda.current_stream(self.device).cuda_stream)
        self.failed |= number is None
        return number or 0

    # torch operators

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        self.forget()
        inputs = [self.view(t) for t in tree_flatten((args, kwargs))[0] if isinstance(t, Tensor)]
        out = func(*args, **kwargs)
        outs = tree_flatten(out)[0]
        if not all(isinstance(t, Tensor) for t in outs):
            self.failed = True
            return out
        fresh = [t for t in outs if t.numel() and self.storage(t) not in self.known]
        name, stream = func.name().split(".")[0], self.stream()
        if name in EMPTY:
            for t in fresh:
                self.allocate(t, stream)
        elif fresh or func._schema.is_mutable:
            flat, structure = tree_flatten((args, kwargs))
            views = iter(inputs)
            flat = [next(views) if isinstance(t, Tensor) else t for t in flat]
            sources = [self.add_source(t) if any(t is f for f in fresh) else None for t in outs]
            self.compute(func, flat, structure, sources, stream)
        return out

    def allocate(self, t: Tensor, stream: int) -> None:
        source = self.add_source(t)
        size, stride = tuple(t.shape), t.stride()
        kind: dict[str, Any] = dict(dtype=t.dtype, device=t.device)

        def step(state: State) -> None:
            with state.on(stream):
                state.put(source, torch.empty_strided(size, stride, **kind))

        def on_current_stream(state: State) -> None:
            state.put(source, torch.empty_strided(size, stride, **kind))

        self.steps.append(step if stream else on_current_stream)

    def compute(
        self, func: Any, flat: list[Any], structure: Any, sources: list[int | None], stream: int
    ) -> None:
        def step(state: State) -> None:
            values = [
                value.of(state.bases[value.source]) if isinstance(value, View) else value
                for value in flat
            ]
            args, kwargs = tree_unflatten(values, structure)
            with state.on(stream):
                outs = tree_flatten(func(*args, **kwargs))[0]
            for source, t in zip(sources, outs, strict=True):
                if source is not None:
                    state.put(source, t)

        self.steps.append(step)

    # launches

    def launched(
        self, kernel: Any, grid: Any, args: tuple[Any, ...], kwargs: Any, made: Any
    ) -> None:
        self.forget()
        defaults = defaults_of(kernel.fn)
        values = dict(zip(defaults, args, strict=False))
        options = {n: value for n, value in kwargs.items() if n not in defaults}
        values |= {n: value for n, value in kwargs.items() if n in defaults}
        flat, tensors, descriptors = [], [], []
        for at, (name, default) in enumerate(defaults.items()):
            value = values.get(name, default)
            flat.append(value)
            if isinstance(value, Tensor):
                tensors.append((at, self.view(value)))
                flat[-1] = None
            elif hasattr(value, "base") and isinstance(value.base, Tensor):
                descriptors.append((at, rebase(value, None), self.view(value.base)))
                flat[-1] = None
        size = (*grid, 1, 1)[:3]
        runner = made[size] if made is not None else interpreted(kernel, grid, options)
        self.steps.append(Launch(runner, flat, tensors, descriptors, self.stream()))

    # streams: see `streams.py`

    def forked(self, side: torch.cuda.Stream, ahead: bool) -> None:
        path = (*self.paths[self.stream()], ahead)
        if path not in self.paths:
            self.paths.append(path)
        self.by_handle[side.cuda_stream] = self.paths.index(path)
        self.waits(side.cuda_stream, torch.cuda.current_stream(self.device).cuda_stream)

    def waits(self, stream: int, other: int) -> None:
        a, b = (self.by_handle.get(handle, -1) for handle in (stream, other))
        self.failed |= min(a, b) < 0
        number = self.add_event(None)

        def step(state: State) -> None:
            state.gpu.record(number, b)
            state.gpu.wait(number, a)

        self.steps.append(step)

    def add_event(self, event: Any) -> int:
        self.events.append(event)
        return len(self.events) - 1

    def marked(self, event: Any) -> None:
        number, stream = self.add_event(event), self.stream()

        def step(state: State) -> None:
            state.gpu.record(number, stream)

        self.steps.append(step)

    def awaited(self, event: Any) -> None:
        found = [number for number, known in enumerate(self.events) if known is event]
        stream = self.stream()
        self.failed |= not found

        def step(state: State) -> None:
            state.gpu.wait(found[-1], stream)

        self.steps.append(step)

    def plan(self, results: Any) -> Plan | None:
        """The recorded plan; None if it cannot be replayed."""
        flat, structure = tree_flatten(results)
        views = [self.view(t) if isinstance(t, Tensor) else t for t in flat]
        for view in views:
            # autograd would see a returned input as another tensor
            self.failed |= not isinstance(view, View) or 0 <= view.source < self.inputs
        if self.failed:
            return None
        self.forget()
        return Plan(self.steps, self.sources, self.paths, (views, structure))


@functools.cache
def defaults_of(function: Callable[..., Any]) -> dict[str, Any]:
    """Of each parameter, by name: a lookup takes a quarter of a recording."""
    return {name: p.default for name, p in inspect.signature(function).parameters.items()}


def launchers() -> list[Any]:
    """The classes that launch kernels, that of the interpreter only if it runs: it needs NumPy, and
    before Triton 3.6 its launches cannot be recorded."""
    interpreter = sys.modules.get("triton.runtime.interpreter")
    kinds = [jit.JITFunction, getattr(interpreter, "InterpretedFunction", None)]
    return [kind for kind in kinds if hasattr(kind, "run")]


def interpreted(kernel: Any, grid: Any, options: dict[str, Any]) -> Callable[..., Any]:
    return lambda *args: kernel[grid](*args, **options)


@contextmanager
def launches_go_to(recorder: Recorder) -> Iterator[None]:
    """Launches of this thread run and are recorded."""
    token = recording.set(True)
    streams.listener.set(recorder)
    own = {kind: kind.run for kind in launchers()}

    def recorded(kind: Any) -> Callable[..., Any]:
        def run(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
            with _disable_current_modes():  # the interpreter copies tensors
                made = own[kind](self, *args, grid=grid, warmup=warmup, **kwargs)
            if recording.get():
                recorder.launched(self, grid, args, kwargs, made)
            return made

        return run

    for kind in own:
        kind.run = recorded(kind)
    try:
        yield
    finally:
        for kind, run in own.items():
            kind.run = run
        streams.listener.set(None)
        recording.reset(token)


def is_possible(tensor: Tensor) -> bool:
    """Whether calls may be replayed: not while launches are hooked or recorded, or while tile
    configs are overridden."""
    return (
        (tensor.is_cuda or everywhere.get())
        and jit.JITFunction.run is ahead.RUN
        and not recording.get()
        and not ahead.only_compiles.get()
        and not launch.override
    )


class Repeated:
    """A function of tensors and numbers whose calls are recorded and replayed."""

    def __init__(self, run: Callable[[Any], Any]) -> None:
        self.run = run
        # by key of a call: None after the first call, False if calls cannot be replayed
        self.plans: dict[Any, Plan | bool | None] = {}

    def __call__(self, at: Any, tensors: Sequence[Tensor | None], rest: Any) -> Any:
        """run(at), a function of these tensors of `at` and of `rest`."""
        call = self.known(at, tensors, rest)
        return self.run(at) if call is None else call()

    def known(
        self, at: Any, tensors: Sequence[Tensor | None], rest: Any,
        possible: Callable[[], bool] = lambda: True,
    ) -> Callable[[], Any] | None:  # fmt: skip
        """A callable that records or replays run(at). None for the first call with a key, and where
        calls cannot be replayed. `possible` decides whether the call may be recorded."""
        inputs = [t for t in tensors if t is not None]
        key = (rest, *map(described, tensors), shared(inputs))
        plan = self.plans.get(key)
        if isinstance(plan, Plan):
            return functools.partial(plan, inputs)
        if plan is None and key in self.plans:
            if possible():
                return functools.partial(self.record, key, at, inputs)
            self.plans[key] = False
        elif plan is None:
            if len(self.plans) >= MAX_PLANS:
                self.plans.clear()
            self.plans[key] = None
        return None

    def record(self, key: Any, at: Any, inputs: list[Tensor]) -> Any:
        if not ahead.one_at_a_time.acquire(blocking=False):
            return self.run(at)  # another thread has replaced launches
        try:
            recorder = Recorder(inputs)
            with launches_go_to(recorder), recorder:
                results = self.run(at)
        finally:
            ahead.one_at_a_time.release()
        self.plans[key] = recorder.plan(results) or False
        return results


@functools.cache
def repeats(run: Callable[[Any], Any]) -> Repeated:
    """What repeats the calls of a function; always the same one."""
    return Repeated(run)


def described(t: Tensor | None) -> Any:
    if t is None:
        return None
    return t.shape, t.stride(), t.storage_offset(), t.dtype, t.device, t.data_ptr() % 16


def shared(tensors: Sequence[Tensor]) -> tuple[int, ...]:
    """Of each tensor, the number of the first tensor with the same storage."""
    seen: dict[int, int] = {}
    return tuple(
        seen.setdefault(t.untyped_storage().data_ptr(), number) for number, t in enumerate(tensors)
    )
