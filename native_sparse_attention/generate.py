"""One token after the other: which to take of a model's logits, and steps as CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from math import ceil
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from .cache.layout import integers
from .cache.kv_cache import KVCache
from .checks.scalars import LEAST_NORMAL, as_float, as_int, check_finite, check_int, shown


def check_sampling(
    temperature: Any,
    filter_thres: Any,
    top_p: Any,
    generator: Any,
    top_k: Any,
    device: torch.device,
) -> tuple[Any, ...]:
    """What `sample_token` takes beside the logits."""
    heat = check_finite("temperature", temperature)
    if 0.0 < heat < LEAST_NORMAL:
        raise ValueError(
            f"temperature must be 0 or less, or at least {LEAST_NORMAL:.2g}, got {temperature!r}"
        )
    part = as_float(filter_thres)
    if not 0.0 <= part < 1.0:
        raise ValueError(f"filter_thres must be in [0, 1), got {shown(filter_thres)}")
    held = None if top_p is None else as_float(top_p)
    if held is not None and not 0.0 < held <= 1.0:
        raise ValueError(f"top_p must be in (0, 1], got {shown(top_p)}")
    if generator is not None and not isinstance(generator, torch.Generator):
        raise ValueError(f"generator must be a torch.Generator or None, got {shown(generator)}")
    if generator is not None and generator.device.type != device.type:
        raise ValueError(f"generator must be on {device} as prompt is, got {generator.device}")
    # less than any probability of float32 is as good as the least
    held = None if held is None else max(held, LEAST_NORMAL)
    return heat, part, held, generator, None if top_k is None else check_int("top_k", top_k, 1)


def check_prompt(prompt: Tensor, lengths: Sequence[int] | Tensor | None) -> list[int]:
    """Tokens of each row of a prompt [b, n], padded on the right."""
    if prompt.numel() == 0:
        raise ValueError(
            f"prompt must have shape [b, n] with at least one token, got {list(prompt.shape)}"
        )
    b, n = prompt.shape
    if lengths is None:
        return [n] * b
    counts = integers("prompt_lengths", lengths)
    if len(counts) != b or any(not 1 <= count <= n for count in counts):
        raise ValueError(
            f"prompt_lengths must be {b} integers between 1 and {n}, the prompt's, got {counts}"
        )
    return counts


def check_stop(tokens: Any, num_tokens: int) -> list[int]:
    """Ids of the vocabulary: None, one, or several."""
    if tokens is None:
        return []
    one = as_int(tokens)
    if isinstance(tokens, Tensor) and tokens.ndim > 0:
        tokens = tokens.tolist()
    if one is not None:
        tokens = [one]
    elif isinstance(tokens, (str, bytes, Tensor)) or not isinstance(tokens, Iterable):
        raise ValueError(f"stop_tokens must be token ids, got {shown(tokens)}")
    ids = []
    for token in tokens:
        number = as_int(token)
        if number is None or number < 0:
            raise ValueError(f"stop_tokens must be token ids, got {shown(token)}")
        if number >= num_tokens:
            raise ValueError(
                f"stop_tokens must be token ids below {num_tokens}, the size of the vocabulary, "
                f"got {number}"
            )
        ids.append(number)
    return ids


def sample_token(
    logits: Tensor,
    temperature: float,
    filter_thres: float,
    top_p: float | None,
    generator: torch.Generator | None,
    top_k: int | None = None,
) -> Tensor:
    """One token [b] from logits [b t]."""
    if temperature <= 0.0:
        return logits.argmax(dim=-1)
    count = max(1, ceil((1.0 - filter_thres) * logits.shape[-1]))
    count = count if top_k is None else min(count, top_k)
    values, tokens = logits.float().topk(count, dim=-1)
    # differences to the largest, which stay finite at any temperature
    probs = ((values - values[:, :1]) / temperature).softmax(dim=-1)
    if top_p is not None:
        # drop a token where those before it already hold top_p
        probs = probs.masked_fill(probs.cumsum(dim=-1) - probs >= top_p, 0.0)
    choice = probs.multinomial(1, generator=generator)
    return tokens.gather(-1, choice)[:, 0]


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """A model in training mode without dropout, and then each module as it was: parts of it may be
    kept in eval mode. Modules with a `train` of their own, which may do more, are told by it."""
    if not model.training:
        yield
        return
    modes = [(module, module.training) for module in model.modules()]
    try:
        model.eval()
        yield
    finally:
        model.train()
        # parents come before their parts, whose modes `train` changes too
        for module, mode in modes:
            if module.training != mode:
                module.train(mode)
        for module, mode in modes:
            if module.training != mode:
                module.training = mode


class GraphedSteps:
    """`forward(ids, weights={})`, ids [b n], over a model's caches, one a layer and all of one
    length, whose rows each take n more tokens; replayed as a CUDA graph where the device counts the
    rows' lengths by itself. `weights` stand in for the model's own.

    Two graphs: of steps that complete a window of some row, and of those that do not. The first
    step of each kind runs as it is, and so do all where there is nothing to capture: on another
    device, and where a layer's call was none of `decoding.step`.

    `d`: tokens from one window to the next.
    """

    def __init__(
        self,
        forward: Callable[..., Tensor],
        caches: list[KVCache],
        d: int,
        model: nn.Module,
    ):
        self.forward, self.caches, self.d, self.model = forward, caches, d, model
        self.weights: dict[str, Tensor] = {}
        self.seen: set[bool] = set()
        self.graphs: dict[bool, tuple[torch.cuda.CUDAGraph, Tensor]] = {}
        self.ids: Tensor | None = None

    def __call__(self, ids: Tensor) -> Tensor:
        """The step's result: the graph's own, which the next step writes over."""
        counts = [ids.shape[1]] * len(ids)
        lengths = self.caches[0].lengths
        kind = any((held + ids.shape[1]) // self.d > held // self.d for held in lengths)
        if kind not in self.seen or not self.can_capture(ids):
            self.seen.add(kind)
            return self.forward(ids)
        self.caches[0].check(len(ids), ids.shape[1], None)
        for cache in self.caches:
            if cache.page_size is not None:
                cache.room({}, counts)
        if self.ids is None:
            self.ids = ids.clone()
        self.ids.copy_(ids)
        if kind not in self.graphs:
            self.graphs[kind] = self.capture(self.ids)
        else:
            for cache in self.caches:
                cache.count(counts)
        graph, out = self.graphs[kind]
        graph.replay()
        return out

    def can_capture(self, ids: Tensor) -> bool:
        fixed = self.ids is None or self.ids.shape == ids.shape
        static = all(c.max_length is not None and c.counts_itself for c in self.caches)
        return ids.is_cuda and fixed and static

    def capture(self, ids: Tensor) -> tuple[torch.cuda.CUDAGraph, Tensor]:
        """Of one step, which the host counts here and the first replay does."""
        with torch.cuda.device_of(ids):
            return self.captured(ids)

    def captured(self, ids: Tensor) -> tuple[torch.cuda.CUDAGraph, Tensor]:
        # torch's own stream is one for all GPUs, on that which captured first
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
        if not torch.is_autocast_enabled("cuda"):
            with torch.cuda.graph(graph, stream=stream):
                return graph, self.forward(ids)
        dtype = torch.get_autocast_dtype("cuda")
        self.weights = self.weights or cast_weights(self.model, dtype)
        with (
            torch.cuda.graph(graph, stream=stream),
            torch.autocast("cuda", dtype, cache_enabled=False),
        ):
            return graph, self.forward(ids, weights=self.weights)


def cast_weights(model: nn.Module, dtype: torch.dtype) -> dict[str, Tensor]:
    """What autocast makes of the weights of linear layers, by name. A CUDA graph needs copies that
    last as it does: autocast's own are gone when its context ends."""
    return {
        f"{name}.{key}": weight.to(dtype)
        for name, module in model.named_modules()
        if type(module) is nn.Linear
        for key, weight in module.named_parameters(recurse=False)
        if weight.dtype == torch.float32
    }


@torch.no_grad()
def generate(
    model: Any,
    prompt: Tensor,
    held: list[int],
    steps: int,
    rule: tuple[Any, ...],
    use_cache_kv: bool,
    stop: list[int],
) -> Iterator[Tensor]:
    """Tokens [b], so many `steps`, after prompts [b n] of which the first `held` tokens are real;
    `rule` is what `sample_token` takes beside the logits."""
    after = cached_logits(model, prompt, held, steps) if use_cache_kv else None
    text, place = prompt, torch.tensor(held, device=prompt.device)
    rows = torch.arange(len(prompt), device=prompt.device)
    done = torch.zeros(len(prompt), dtype=torch.bool, device=prompt.device)
    token = None
    for _ in range(steps):
        if after is None:
            with evaluating(model):
                logits = model(text, disable_flex=True)[rows, place - 1]
        else:
            logits = after(token)
        new = sample_token(logits, *rule)
        # a text that has ended goes on with the token that ended it
        token = new if token is None else torch.where(done, token, new)
        yield token
        if stop:
            done |= (token[:, None] == token.new_tensor(stop)).any(1)
            if done.all():
                return
        if after is None:
            text = F.pad(text, (0, 1))
            text[rows, place] = token
            place = place + 1


def cached_logits(
    model: Any, prompt: Tensor, held: list[int], steps: int
) -> Callable[[Tensor | None], Tensor]:
    """A function that gives logits [b t] after the prompt, and then after each token [b]."""
    cache = model.new_cache(max_length=max(1, max(held, default=1) + steps), batch=len(prompt))
    d = getattr(model.layers[0][0], "compress_block_sliding_stride", 1)

    def forward(
        ids: Tensor,
        lengths: list[int] | None = None,
        weights: dict[str, Tensor] | None = None,
    ) -> Tensor:
        call = dict(cache=cache, disable_flex=True, lengths=lengths)
        with evaluating(model):
            return functional_call(model, weights or {}, (ids,), call, tie_weights=False)

    graphed = GraphedSteps(forward, cache, d, model)
    lengths = held if min(held, default=0) < prompt.shape[1] else None

    def after(token: Tensor | None) -> Tensor:
        if token is not None:
            return graphed(token[:, None])[:, -1]
        logits = forward(prompt, lengths)
        last = torch.tensor(held, device=prompt.device) - 1
        return logits[torch.arange(len(prompt), device=prompt.device), last]

    return after
