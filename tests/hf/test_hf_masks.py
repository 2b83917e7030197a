"""Masks of the user, and what a forward's mask costs."""

import traceback
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

transformers = pytest.importorskip("transformers", reason="needs the extra hf")

from transformers.masking_utils import causal_mask_function

from native_sparse_attention.hf import use_sparse_attention
from native_sparse_attention.hf.mask import nsa_mask
from tests.helpers.tiny_models import CACHE, SPARSE, padded, prompts, tiny, without_padding

TOL = dict(atol=1e-4, rtol=1e-4)
close = torch.testing.assert_close


def causal(mask, documents=None):
    """Whether each token of [B, T] sees each other: [B, 1, T, T]."""
    T = mask.shape[1]
    visible = torch.ones(T, T, dtype=torch.bool).tril() & mask.bool()[:, None, None]
    if documents is not None:
        visible = visible & (documents[:, None, :, None] == documents[:, None, None])
    return visible


def forms(visible):
    """The mask as bool, as integers, and added to logits."""
    least = torch.zeros(visible.shape).masked_fill(~visible, torch.finfo(torch.float32).min)
    infinite = torch.zeros(visible.shape).masked_fill(~visible, -torch.inf)
    return visible, visible.int(), visible.long(), least, infinite


@pytest.mark.parametrize("left", [True, False])
@torch.no_grad()
def test_masks_of_four_axes_are_padding(left):
    model, texts = use_sparse_attention(tiny(), **SPARSE), prompts(33, 40)
    batch = padded(texts, left)
    mask = batch["attention_mask"]
    expected = model(**batch).logits
    for form in forms(causal(mask)):
        out = model(**batch | dict(attention_mask=form)).logits
        for one, other in zip(without_padding(out, mask), without_padding(expected, mask)):
            close(one, other, **TOL)


@torch.no_grad()
def test_masks_of_four_axes_are_packed_documents():
    model, texts = use_sparse_attention(tiny(), **SPARSE), prompts(14, 26)
    packed = torch.cat(texts, 1)
    positions = torch.cat([torch.arange(t.shape[1]) for t in texts])[None]
    expected = model(packed, position_ids=positions, use_cache=False).logits
    documents = torch.tensor([[0] * 14 + [1] * 26])
    visible = causal(torch.ones(1, 40), documents)
    for form in forms(visible):
        out = model(packed, attention_mask=form, position_ids=positions).logits
        close(out, expected, **TOL)


@pytest.mark.parametrize("static", [False, True])
@torch.no_grad()
def test_masks_of_four_axes_over_a_cache(static):
    model, (text,) = use_sparse_attention(tiny(), **SPARSE), prompts(40)
    expected = model(text).logits[:, 30:]
    cache = transformers.DynamicCache(config=model.config)
    if static:
        cache = transformers.StaticCache(config=model.config, max_cache_len=48)
    model(text[:, :30], **{CACHE: cache})
    visible = causal(torch.ones(1, 40))[:, :, 30:]
    if static:
        visible = torch.nn.functional.pad(visible, (0, 8))
    out = model(text[:, 30:], attention_mask=visible, **{CACHE: cache}).logits
    close(out, expected, **TOL)


@torch.no_grad()
def test_chunk_of_four_axes_that_ends_with_padding():
    """Over a cache that grows its last keys are padding; in a static one they are not written."""
    model, (text,) = use_sparse_attention(tiny(), **SPARSE), prompts(40)
    expected = model(text[:, :36]).logits[:, 30:]
    cache = transformers.DynamicCache(config=model.config)
    model(text[:, :30], **{CACHE: cache})
    real = (torch.arange(40) < 36)[None].long()
    out = model(text[:, 30:], attention_mask=causal(real)[:, :, 30:], **{CACHE: cache}).logits
    close(out[:, :6], expected, **TOL)


@pytest.mark.parametrize("family", ["Llama", "Gemma3"])
@torch.no_grad()
def test_mask_of_a_whole_static_cache(family):
    """Its ones after the last token say nothing, also where they are as many as the padding."""
    model, (text,) = tiny(family), prompts(20)
    use_sparse_attention(model)
    for pads in (11, 12, 13):
        mask = (torch.arange(32) >= pads)[None].long()
        positions = (mask.cumsum(1) - 1).clamp(min=0)[:, :20]
        cache = transformers.StaticCache(config=model.config, max_cache_len=32)
        out = model(text, attention_mask=mask, position_ids=positions, **{CACHE: cache})
        expected = model(text[:, pads:], use_cache=False).logits[:, -1]
        close(out.logits[:, -1], expected, **TOL)


@torch.no_grad()
def test_windows_count_padding_between_tokens():
    """As those of SDPA do, whole and over a cache."""
    model, (ids,) = tiny("Gemma3"), prompts(40)
    mask = torch.ones_like(ids)
    mask[:, 10:14] = 0
    positions, real = mask.cumsum(1) - 1, mask[0].bool()
    given = dict(attention_mask=mask, position_ids=positions)
    expected = model(ids, **given, use_cache=False).logits[:, real]
    use_sparse_attention(model)
    close(model(ids, **given, use_cache=False).logits[:, real], expected, **TOL)
    cache, outs = transformers.DynamicCache(config=model.config), []
    for part in (slice(0, 14), slice(14, 40)):
        seen = dict(attention_mask=mask[:, : part.stop], position_ids=positions[:, part])
        outs.append(model(ids[:, part], **seen, **{CACHE: cache}).logits)
    close(torch.cat(outs, dim=1)[:, real], expected, **TOL)


@torch.no_grad()
def test_packed_sequences_go_over_no_cache():
    model, (ids,) = tiny(), prompts(31)
    positions = torch.cat((torch.arange(13), torch.arange(18)))[None]
    use_sparse_attention(model)
    message = "position_ids over a cache must not return to 0 after {} tokens"
    for first, end in ((8, 31), (13, 20)):
        cache = transformers.DynamicCache(config=model.config)
        model(ids[:, :first], position_ids=positions[:, :first], **{CACHE: cache})
        with pytest.raises(ValueError, match=message.format(first)):
            model(ids[:, first:end], position_ids=positions[:, first:end], **{CACHE: cache})
    cache = transformers.StaticCache(config=model.config, max_cache_len=40)
    with pytest.raises(ValueError, match=message.format(0)):
        model(ids, position_ids=positions, **{CACHE: cache})
    # a cache may have more tokens than the positions say, or fewer
    expected = tiny()
    for there in ([[77]], [[3]], [[5, 6]]):
        outs = []
        for one in (model, expected):
            cache = transformers.DynamicCache(config=model.config)
            one(ids[:, :20], **{CACHE: cache})
            new = ids[:, 20 : 20 + len(there[0])]
            outs.append(one(new, position_ids=torch.tensor(there), **{CACHE: cache}).logits)
        close(*outs, **TOL)


class Reads(TorchDispatchMode):
    """Counts values that the host reads for masks; outputs it reads on a CPU alone."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten._local_scalar_dense.default:
            files = (frame.filename for frame in reversed(traceback.extract_stack()))
            self.count += (
                next(Path(f) for f in files if "sparse_attention" in f).parent.name == "hf"
            )
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("pads", [0, 3])
@torch.no_grad()
def test_layers_of_a_step_read_nothing_each(pads):
    """The host waits for a GPU at each read."""
    (text,), counts = prompts(30), []
    mask = (torch.arange(30) >= pads)[None].long()
    for layers in (2, 6):
        model = use_sparse_attention(tiny("Gemma3", num_hidden_layers=layers, layer_types=[
            "sliding_attention", "full_attention"] * (layers // 2)))  # fmt: skip
        cache = transformers.DynamicCache(config=model.config)
        model(text[:, :29], attention_mask=mask[:, :29], **{CACHE: cache})
        positions = mask.cumsum(1)[:, 29:] - 1
        with Reads() as reads:
            model(text[:, 29:], attention_mask=mask, position_ids=positions, **{CACHE: cache})
        counts.append(reads.count)
    assert counts[0] == counts[1]


@torch.no_grad()
def test_causal_mask_is_none():
    model, (text,) = use_sparse_attention(tiny(), **SPARSE), prompts(40)
    close(model(text, attention_mask=causal(torch.ones(1, 40))).logits, model(text).logits)


@torch.no_grad()
def test_other_masks_are_refused():
    model, (text,) = use_sparse_attention(tiny(), **SPARSE), prompts(40)
    window = causal(torch.ones(1, 40)).triu(-5)
    later = torch.ones(1, 1, 40, 40, dtype=torch.bool)
    bias = torch.randn(1, 1, 40, 40)
    heads = causal(torch.ones(1, 40)).repeat(1, 4, 1, 1)
    heads[:, 1, 5, 3] = False
    for mask, told in (
        (window, "must be causal, with padding or packed documents: give attention_mask"),
        (later, "must be causal, with padding or packed documents: give attention_mask"),
        (bias, "must be 0 where a key is seen, and -inf where it is not, got other numbers"),
        (heads, "must be the same for all heads: give attention_mask"),
        (later[..., :20], r"must have shape \[1, S\] or \[1, 1, 40, 40\], got a torch.bool"),
    ):
        with pytest.raises(ValueError, match=told):
            model(text, attention_mask=mask)


def test_masks_say_what_they_are():
    """Of a forward without padding there is none; else facts of keys, linear in their number."""
    given = dict(batch_size=2, q_length=5, mask_function=causal_mask_function)
    tokens = torch.ones(2, 9)
    assert nsa_mask(**given, kv_length=5) is None
    assert nsa_mask(**given, kv_length=9, q_offset=4, attention_mask=tokens) is None
    static = nsa_mask(**given, kv_length=20, q_offset=4, attention_mask=tokens)
    assert static.length == 9 and not static.has_rows
    assert nsa_mask(**given, kv_length=20, attention_mask=static) is static
    tokens[0, :3] = 0
    for length in (9, 20):
        mask = nsa_mask(**given, kv_length=length, q_offset=4, attention_mask=tokens)
        assert mask.length == 9 and mask.tokens.equal(tokens.bool()) and mask.documents is None
    step = given | dict(q_length=1, kv_length=20, q_offset=torch.tensor(8))
    assert nsa_mask(**step).length.tolist() == 9
    config = SimpleNamespace(nsa_config=dict(dense_length=8))
    assert nsa_mask(**step, config=config).past_dense_length
    mask = nsa_mask(**step, attention_mask=tokens)
    assert mask.length.tolist() == 9 and mask.tokens.shape == (2, 20)
    assert mask.tokens[:, :9].equal(tokens.bool()) and not mask.tokens[:, 9:].any()
    moved = mask.to("meta")
    assert moved.tokens.is_meta and moved.length.is_meta and mask.to("cpu") is mask


def test_mask_functions_of_a_model_are_refused():
    given = dict(batch_size=1, q_length=5, kv_length=5)
    with pytest.raises(ValueError, match="got a mask function of the model's own"):
        nsa_mask(**given, mask_function=causal_mask_function, use_vmap=True)

    def image(b, h, q, k):
        return causal_mask_function(b, h, q, k) | (k < 3)

    with pytest.raises(ValueError, match="must be causal, got one that shows later tokens"):
        nsa_mask(**given, mask_function=image, allow_is_causal_skip=False)
