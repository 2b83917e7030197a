"""Autoregressive generation: sampling from logits, and decode steps as CUDA graphs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from .cache.kv_cache import integers
from .checks import LEAST_NORMAL, check_generator, check_int, check_number, refusal


def check_prompt(prompt: Tensor, lengths: Sequence[int] | Tensor | None) -> list[int]:
    """Length of each prompt of a batch [b, n], padded on the right."""
    b, n = prompt.shape
    if prompt.numel() == 0:
        raise ValueError(f"prompt must have shape [b, n] with at least one token, got {[b, n]}")
    counts = [n] * b if lengths is None else integers("prompt_lengths", lengths)
    if len(counts) != b or any(not 1 <= count <= n for count in counts):
        raise refusal("prompt_lengths", f"{b} integers between 1 and {n}, the prompt's", counts)
    return counts


def check_stop(tokens: Any, num_tokens: int) -> list[int]:
    """Stop tokens, given as None, one token id or several, as a list of ids."""
    if tokens is None:
        return []
    is_one = getattr(tokens, "ndim", None) == 0 or not isinstance(tokens, Iterable)
    ids = [tokens] if is_one else tokens
    return [check_int("stop_tokens", token, 0, num_tokens) for token in ids]


def token_sampler(
    temperature: float, filter_thres: float, top_p: float | None,
    generator: torch.Generator | None, top_k: int | None = None,
) -> Callable[[Tensor], Tensor]:  # fmt: skip
    """Check the arguments of `Transformer.stream`, and return a function that samples one token per
    sequence, [b], from logits [b vocabulary]."""
    check_generator(generator)
    temperature = check_number("temperature", temperature)
    below_one = math.nextafter(1.0, 0.0)
    filter_thres = check_number("filter_thres", filter_thres, "in [0, 1)", 0.0, below_one)
    if top_p is not None:
        top_p = check_number("top_p", top_p, "in (0, 1]", LEAST_NORMAL, 1)
    if top_k is not None:
        top_k = check_int("top_k", top_k, 1)

    def sample(logits: Tensor) -> Tensor:
        if temperature < LEAST_NORMAL:
            return logits.argmax(dim=-1)
        # rounded before: (1 - 0.7) * 10 is a little more than 3
        count = max(1, math.ceil(round((1.0 - filter_thres) * logits.shape[-1], 6)))
        count = count if top_k is None else min(count, top_k)
        values, tokens = logits.float().topk(count, dim=-1)
        # subtract the maximum before the division: the result is finite at any temperature
        probs = ((values - values[:, :1]) / temperature).softmax(dim=-1)
        if top_p is not None:
            # drop a token if the more probable ones already have a total of top_p
            probs = probs.masked_fill(probs.cumsum(dim=-1) - probs >= top_p, 0.0)
        choice = probs.multinomial(1, generator=generator)
        return tokens.gather(-1, choice)[:, 0]

    return sample


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put a model into eval mode, and afterwards each module back into its own mode."""
    if not model.training:
        yield
        return
    modes = [(module, module.training) for module in model.modules()]
    try:
        model.eval()
        yield
    finally:
        model.train()
        for module, mode in modes:
            module.training = mode


class Decoder:
    """A Transformer with a KV cache for each layer. If the decode kernels run in every layer, so
    that the device counts the sequence lengths, its steps are replayed as CUDA graphs: one for
    steps that complete a compression window of some sequence, and one for all others. The first
    step of each kind runs uncaptured."""

    def __init__(self, model: Any, batch: int, max_length: int):
        self.model = model
        self.caches = model.new_cache(max_length=max_length, batch=batch)
        self.d = getattr(model.layers[0][0], "compress_block_sliding_stride", 1)
        self.weights: dict[str, Tensor] = {}  # in place of the model's own
        self.warmed_up: set[bool] = set()
        self.graphs: dict[bool, tuple[torch.cuda.CUDAGraph, Tensor]] = {}
        self.ids = torch.empty(0)

    def forward(self, ids: Tensor, lengths: list[int] | None = None) -> Tensor:
        """Logits of the next tokens [b n]."""
        call = dict(cache=self.caches, disable_flex=True, lengths=lengths)
        with evaluating(self.model):
            return functional_call(self.model, self.weights, (ids,), call, tie_weights=False)

    def step(self, ids: Tensor) -> Tensor:
        """Logits of the next token [b 1]. A graph's output is overwritten by its next replay."""
        completes_window = any((n + 1) % self.d == 0 for n in self.caches[0].lengths)
        is_static = ids.is_cuda and all(cache.counts_itself for cache in self.caches)
        if not is_static or completes_window not in self.warmed_up:
            self.warmed_up.add(completes_window)
            return self.forward(ids)
        self.ids = self.ids.copy_(ids) if self.graphs else ids.clone()
        if completes_window in self.graphs:
            for cache in self.caches:
                cache.count([1] * len(ids))
        else:
            self.graphs[completes_window] = self.capture()
        graph, out = self.graphs[completes_window]
        graph.replay()
        return out

    def capture(self) -> tuple[torch.cuda.CUDAGraph, Tensor]:
        """Capture one step. The host counts its tokens now, the device at the first replay."""
        casts, dtype = torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")
        if casts and not self.weights:
            # autocast frees its own copies when its context ends; the graph needs them longer
            self.weights = {
                f"{name}.{key}": weight.to(dtype)
                for name, module in self.model.named_modules()
                if type(module) is nn.Linear
                for key, weight in module.named_parameters(recurse=False)
                if weight.dtype == torch.float32
            }
        with torch.cuda.device_of(self.ids):
            # torch's default capture stream is on the GPU that captured first, whichever that is
            graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
            with (
                torch.cuda.graph(graph, stream=stream),
                torch.autocast("cuda", dtype, enabled=casts, cache_enabled=False),
            ):
                return graph, self.forward(self.ids)


@torch.no_grad()
def generate(
    model: Any, prompt: Tensor, prompt_lengths: list[int], steps: int,
    choose: Callable[[Tensor], Tensor], use_cache_kv: bool, stop: list[int],
) -> Iterator[Tensor]:  # fmt: skip
    """Yield up to `steps` tokens [b] after prompts [b n], whose first `prompt_lengths` tokens are
    real. `choose` makes tokens of logits [b vocabulary]."""
    decoder = Decoder(model, len(prompt), max(prompt_lengths) + steps) if use_cache_kv else None
    lengths = prompt_lengths if min(prompt_lengths) < prompt.shape[1] else None
    text = prompt.clone()  # the caller may write to the prompt and to what is yielded
    ends = torch.tensor(prompt_lengths, device=prompt.device)
    batch = torch.arange(len(prompt), device=prompt.device)
    is_finished = torch.zeros(len(prompt), dtype=torch.bool, device=prompt.device)
    token = None
    for _ in range(steps):
        if decoder is None:
            with evaluating(model):
                logits = model(text, disable_flex=True)[batch, ends - 1]
        elif token is None:
            logits = decoder.forward(text, lengths)[batch, ends - 1]
        else:
            logits = decoder.step(token[:, None])[:, -1]
        # a finished sequence repeats its stop token
        token = choose(logits) if token is None else torch.where(is_finished, token, choose(logits))
        yield token.clone()
        if stop:
            is_finished |= torch.isin(token, token.new_tensor(stop))
            if is_finished.all():
                return
        if decoder is None:
            text = F.pad(text, (0, 1))
            text[batch, ends] = token
            ends = ends + 1
