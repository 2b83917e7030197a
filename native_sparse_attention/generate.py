"""Autoregressive generation: sampling from logits, and decode steps as CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from math import ceil
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from .cache.kv_cache import KVCache, integers
from .checks.scalars import LEAST_NORMAL, as_float, as_int, check_finite, check_int, shown


def check_sampling(
    temperature: Any,
    filter_thres: Any,
    top_p: Any,
    generator: Any,
    top_k: Any,
    device: torch.device,
) -> tuple[Any, ...]:
    """Validate the arguments that `sample_token` takes besides the logits, in its order."""
    checked_temperature = check_finite("temperature", temperature)
    if 0.0 < checked_temperature < LEAST_NORMAL:
        raise ValueError(
            f"temperature must be 0 or less, or at least {LEAST_NORMAL:.2g}, got {temperature!r}"
        )
    threshold = as_float(filter_thres)
    if not 0.0 <= threshold < 1.0:
        raise ValueError(f"filter_thres must be in [0, 1), got {shown(filter_thres)}")
    nucleus = None if top_p is None else as_float(top_p)
    if nucleus is not None and not 0.0 < nucleus <= 1.0:
        raise ValueError(f"top_p must be in (0, 1], got {shown(top_p)}")
    if generator is not None and not isinstance(generator, torch.Generator):
        raise ValueError(f"generator must be a torch.Generator or None, got {shown(generator)}")
    if generator is not None and generator.device.type != device.type:
        raise ValueError(f"generator must be on {device} as prompt is, got {generator.device}")
    # any smaller top_p keeps the same single token
    nucleus = None if nucleus is None else max(nucleus, LEAST_NORMAL)
    checked_top_k = None if top_k is None else check_int("top_k", top_k, 1)
    return checked_temperature, threshold, nucleus, generator, checked_top_k


def check_prompt(prompt: Tensor, lengths: Sequence[int] | Tensor | None) -> list[int]:
    """Length of each prompt of a batch [b, n], padded on the right."""
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
    """Stop tokens, given as None, one token id or several, as a list of ids."""
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
    """Sample one token per sequence, [b], from logits [b vocabulary]."""
    if temperature <= 0.0:
        return logits.argmax(dim=-1)
    # rounded before: (1 - 0.7) * 10 is a little more than 3
    count = max(1, ceil(round((1.0 - filter_thres) * logits.shape[-1], 6)))
    count = count if top_k is None else min(count, top_k)
    values, tokens = logits.float().topk(count, dim=-1)
    # subtract the maximum before the division: the result is finite at any temperature
    probs = ((values - values[:, :1]) / temperature).softmax(dim=-1)
    if top_p is not None:
        # drop a token if the more probable ones already have a total of top_p
        probs = probs.masked_fill(probs.cumsum(dim=-1) - probs >= top_p, 0.0)
    choice = probs.multinomial(1, generator=generator)
    return tokens.gather(-1, choice)[:, 0]


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put a model into eval mode, and afterwards each module back into its own mode.

    A module that overrides `train` is switched by that method, which may do more than set the flag.
    """
    if not model.training:
        yield
        return
    modes = [(module, module.training) for module in model.modules()]
    try:
        model.eval()
        yield
    finally:
        model.train()
        # parents come first: their `train` also changes the modes of their children
        for module, mode in modes:
            if module.training != mode:
                module.train(mode)
        for module, mode in modes:
            if module.training != mode:
                module.training = mode


class GraphedDecoding:
    """Decode steps `forward(ids, weights={})`, ids [b n], that are replayed as CUDA graphs.

    `caches` holds one KV cache per layer, all of the same lengths; a step appends n tokens to each
    sequence. `weights` replace the model's own. `d` is the stride of the compression windows.

    There are two graphs: one for steps that complete a compression window of some sequence, and one
    for all others. The first step of each kind runs uncaptured. A step is captured only on a GPU,
    if the decode kernels run in every layer, so that the device counts the sequence lengths.
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
        self.warmed_up: set[bool] = set()
        self.graphs: dict[bool, tuple[torch.cuda.CUDAGraph, Tensor]] = {}
        self.ids: Tensor | None = None

    def __call__(self, ids: Tensor) -> Tensor:
        """The step's output. A graph's output is overwritten by its next replay."""
        new = ids.shape[1]
        counts = [new] * len(ids)
        lengths = self.caches[0].lengths
        completes_window = any((n + new) // self.d > n // self.d for n in lengths)
        if completes_window not in self.warmed_up or not self.can_capture(ids):
            self.warmed_up.add(completes_window)
            return self.forward(ids)
        self.caches[0].check(len(ids), new, None)
        for cache in self.caches:
            cache.reserve(counts)
        if self.ids is None:
            self.ids = ids.clone()
        self.ids.copy_(ids)
        if completes_window not in self.graphs:
            self.graphs[completes_window] = self.capture(self.ids)
        else:
            for cache in self.caches:
                cache.count(counts)
        graph, out = self.graphs[completes_window]
        graph.replay()
        return out

    def can_capture(self, ids: Tensor) -> bool:
        same_shape = self.ids is None or self.ids.shape == ids.shape
        is_static = all(c.max_length is not None and c.counts_itself for c in self.caches)
        return ids.is_cuda and same_shape and is_static

    def capture(self, ids: Tensor) -> tuple[torch.cuda.CUDAGraph, Tensor]:
        """Capture one step. The host counts its tokens now, the device at the first replay."""
        casts, dtype = torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")
        if casts:
            self.weights = self.weights or cast_weights(self.model, dtype)
        with torch.cuda.device_of(ids):
            # torch's default capture stream is on the GPU that captured first, whichever that is
            graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
            with (
                torch.cuda.graph(graph, stream=stream),
                torch.autocast("cuda", dtype, enabled=casts, cache_enabled=False),
            ):
                return graph, self.forward(ids, weights=self.weights)


def cast_weights(model: nn.Module, dtype: torch.dtype) -> dict[str, Tensor]:
    """The float32 weights of linear layers in `dtype`, by name, as autocast casts them.

    A CUDA graph needs copies that live as long as the graph; autocast frees its own copies when its
    context ends.
    """
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
    prompt_lengths: list[int],
    steps: int,
    sampling: tuple[Any, ...],
    use_cache_kv: bool,
    stop: list[int],
) -> Iterator[Tensor]:
    """Yield up to `steps` tokens [b] after prompts [b n].

    The first `prompt_lengths` tokens of each prompt are real. `sampling` holds the arguments of
    `sample_token` besides the logits.
    """
    next_logits = None
    if use_cache_kv:
        next_logits = cached_logits(model, prompt, prompt_lengths, steps)
    # the caller may write to the prompt and to what is yielded
    text = prompt if use_cache_kv else prompt.clone()
    ends = torch.tensor(prompt_lengths, device=prompt.device)
    batch = torch.arange(len(prompt), device=prompt.device)
    is_finished = torch.zeros(len(prompt), dtype=torch.bool, device=prompt.device)
    token = None
    for _ in range(steps):
        if next_logits is None:
            with evaluating(model):
                logits = model(text, disable_flex=True)[batch, ends - 1]
        else:
            logits = next_logits(token)
        new = sample_token(logits, *sampling)
        # a finished sequence repeats its stop token
        token = new if token is None else torch.where(is_finished, token, new)
        yield token.clone()
        if stop:
            is_finished |= (token[:, None] == token.new_tensor(stop)).any(1)
            if is_finished.all():
                return
        if next_logits is None:
            text = F.pad(text, (0, 1))
            text[batch, ends] = token
            ends = ends + 1


def cached_logits(
    model: Any, prompt: Tensor, prompt_lengths: list[int], steps: int
) -> Callable[[Tensor | None], Tensor]:
    """A function that returns the logits [b vocabulary] of the next token, using a KV cache.

    The first call takes None and processes the prompt; later calls take the last token [b].
    """
    max_length = max(1, max(prompt_lengths, default=1) + steps)
    cache = model.new_cache(max_length=max_length, batch=len(prompt))
    d = getattr(model.layers[0][0], "compress_block_sliding_stride", 1)

    def forward(
        ids: Tensor,
        lengths: list[int] | None = None,
        weights: dict[str, Tensor] | None = None,
    ) -> Tensor:
        call = dict(cache=cache, disable_flex=True, lengths=lengths)
        with evaluating(model):
            return functional_call(model, weights or {}, (ids,), call, tie_weights=False)

    decode = GraphedDecoding(forward, cache, d, model)
    is_padded = min(prompt_lengths, default=0) < prompt.shape[1]
    lengths = prompt_lengths if is_padded else None

    def next_logits(token: Tensor | None) -> Tensor:
        if token is not None:
            return decode(token[:, None])[:, -1]
        logits = forward(prompt, lengths)
        last = torch.tensor(prompt_lengths, device=prompt.device) - 1
        return logits[torch.arange(len(prompt), device=prompt.device), last]

    return next_logits
