"""Batches of texts, and calls of models of transformers with them, over caches."""

import inspect
import itertools

import torch
import transformers

from tests.helpers.tiny_models import close

# 5.24 gives the argument another name
forward = inspect.signature(transformers.LlamaForCausalLM.forward).parameters
CACHE = "cache" if "cache" in forward else "past_key_values"


def padded(texts, left):
    """Texts in one batch: ids, mask and positions [B, T], with padding on the left or right."""
    T = max(text.shape[1] for text in texts)
    ids, mask = torch.zeros(2, len(texts), T, dtype=torch.long)
    for i, text in enumerate(texts):
        n = text.shape[1]
        at = slice(T - n, T) if left else slice(0, n)
        ids[i, at], mask[i, at] = text[0], 1
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    return dict(input_ids=ids, attention_mask=mask, position_ids=positions)


def packed(texts):
    """Texts as documents of one row, by their positions."""
    positions = torch.cat([torch.arange(text.shape[1]) for text in texts])[None]
    return dict(input_ids=torch.cat(texts, 1), position_ids=positions)


def without_padding(out, mask):
    """Of each row [T, ...] of a batch its tokens, as a batch of one."""
    return [row[keep.bool()][None] for row, keep in zip(out, mask)]


def check_rows(out, batch, expected, **tolerance):
    """Check that each row of a batch gives, without its padding, what is expected: rows of a batch
    like it, or of each text alone."""
    assert out.isfinite().all()
    mask = batch["attention_mask"] if "attention_mask" in batch else torch.ones(out.shape[:2])
    if isinstance(expected, torch.Tensor):
        expected = without_padding(expected, mask)
    for row, alone in zip(without_padding(out, mask), expected):
        close(row, alone, **tolerance)


def call(model, ids, cache, **given):
    """Logits of tokens over a cache."""
    return model(ids, **given, **{CACHE: cache}).logits


def call_in_pieces(model, batch, cache, *bounds):
    """Logits of token ids, or of a batch, piece by piece over a cache."""
    batch, outs = dict(input_ids=batch) if isinstance(batch, torch.Tensor) else batch, []
    for start, stop in itertools.pairwise(bounds):
        piece = {name: t[:, start:stop] for name, t in batch.items()}
        if "attention_mask" in batch:
            piece["attention_mask"] = batch["attention_mask"][:, :stop]
        outs.append(call(model, piece.pop("input_ids"), cache, **piece))
    return torch.cat(outs, dim=1)


def dynamic(model):
    return transformers.DynamicCache(config=model.config)


def static(model, length=48):
    return transformers.StaticCache(config=model.config, max_cache_len=length)
