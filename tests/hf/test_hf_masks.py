"""Masks: what a forward knows of its keys, masks of the user, and what a mask costs."""

import traceback
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

transformers = pytest.importorskip("transformers", reason="needs the extra hf")

from transformers.masking_utils import causal_mask_function

from native_sparse_attention.hf import use_sparse_attention
from native_sparse_attention.hf.mask import nsa_mask
from tests.helpers.tiny_models import (
    SPARSE,
    call,
    check_rows,
    close,
    dynamic,
    native,
    packed,
    padded,
    prompts,
    static,
    tiny,
)  # fmt: skip


@pytest.fixture(scope="module")
def model():
    return use_sparse_attention(tiny(), **SPARSE)


def causal(mask, documents=None):
    """Whether each token of [B, T] sees each other: [B, 1, T, T]."""
    T = mask.shape[1]
    visible = torch.ones(T, T, dtype=torch.bool).tril() & mask.bool()[:, None, None]
    if documents is not None:
        visible = visible & (documents[:, None, :, None] == documents[:, None, None])
    return visible


def forms(visible):
    """The mask as bool, as integers, and added to logits."""
    hidden = [torch.zeros(visible.shape).masked_fill(~visible, x) for x in (-3e38, -torch.inf)]
    return visible, visible.to(torch.int16), visible.long(), *hidden


@torch.no_grad()
def test_masks_of_four_axes_are_padding_or_packed_documents(model):
    texts = prompts(14, 26)
    documents = torch.tensor([[0] * 14 + [1] * 26])
    row = packed(texts)
    masks = [(row, causal(torch.ones(1, 40), documents))]
    masks += [(b, causal(b["attention_mask"])) for b in (padded(texts, True), padded(texts, False))]
    for batch, visible in masks:
        expected = model(**batch, use_cache=False).logits
        for form in forms(visible):
            check_rows(model(**batch | dict(attention_mask=form)).logits, batch, expected)


@pytest.mark.parametrize("make", [dynamic, static])
@torch.no_grad()
def test_masks_of_four_axes_over_a_cache(make, model):
    """Over a cache that grows last keys may be padding; in a static one they are not written."""
    (text,) = prompts(40)
    expected, spare = model(text).logits[:, 30:], 8 if make is static else 0
    for T in (10, 1):
        for form in forms(causal(torch.ones(1, 40))[:, :, 40 - T :]):
            cache = make(model)
            call(model, text[:, : 40 - T], cache)
            form = F.pad(form, (0, spare), value=0 if form.dtype != torch.float32 else -3e38)
            positions = torch.arange(40 - T, 40)[None]
            out = call(model, text[:, 40 - T :], cache, attention_mask=form, position_ids=positions)
            close(out, expected[:, 10 - T :])
    if make is static:
        return
    cache, real = make(model), (torch.arange(40) < 36)[None].long()
    call(model, text[:, :30], cache)
    out = call(model, text[:, 30:], cache, attention_mask=causal(real)[:, :, 30:])
    close(out[:, :6], model(text[:, :36]).logits[:, 30:])


@pytest.mark.parametrize("family", ["Llama", "Gemma3"])
@torch.no_grad()
def test_mask_of_a_whole_static_cache(family):
    """Its ones after the last token say nothing, also where they are as many as the padding."""
    model, (text,) = use_sparse_attention(tiny(family)), prompts(20)
    for pads in (11, 12, 13):
        mask = (torch.arange(32) >= pads)[None].long()
        positions = (mask.cumsum(1) - 1).clamp(min=0)[:, :20]
        given = dict(attention_mask=mask, position_ids=positions)
        expected = model(text[:, pads:], use_cache=False).logits[:, -1]
        close(call(model, text, static(model, 32), **given)[:, -1], expected)


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
    close(model(ids, **given, use_cache=False).logits[:, real], expected)
    cache, outs = dynamic(model), []
    for part in (slice(0, 14), slice(14, 40)):
        seen = dict(attention_mask=mask[:, : part.stop], position_ids=positions[:, part])
        outs.append(call(model, ids[:, part], cache, **seen))
    close(torch.cat(outs, dim=1)[:, real], expected)


@torch.no_grad()
def test_packed_sequences_go_over_no_cache(model):
    (ids,), message = prompts(31), "position_ids over a cache must not return to 0 after {} tokens"
    positions = torch.cat((torch.arange(13), torch.arange(18)))[None]
    for first, end in ((8, 31), (13, 20)):
        cache = dynamic(model)
        call(model, ids[:, :first], cache, position_ids=positions[:, :first])
        with pytest.raises(ValueError, match=message.format(first)):
            call(model, ids[:, first:end], cache, position_ids=positions[:, first:end])
    with pytest.raises(ValueError, match=message.format(0)):
        call(model, ids, static(model), position_ids=positions)
    # a cache may have more tokens than the positions say, or fewer
    twin, outs = tiny(), []
    for one in (use_sparse_attention(tiny()), twin):
        cache = dynamic(one)
        call(one, ids[:, :20], cache)
        outs.append(call(one, ids[:, 20:22], cache, position_ids=torch.tensor([[5, 6]])))
    close(*outs)


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
        cache = dynamic(model)
        call(model, text[:, :29], cache, attention_mask=mask[:, :29])
        positions = mask.cumsum(1)[:, 29:] - 1
        with Reads() as reads:
            call(model, text[:, 29:], cache, attention_mask=mask, position_ids=positions)
        counts.append(reads.count)
    assert counts[0] == counts[1]


@torch.no_grad()
def test_other_masks_are_refused(model):
    (text,), plain = prompts(40), causal(torch.ones(1, 40))
    later = torch.ones(1, 1, 40, 40, dtype=torch.bool)
    heads = plain.repeat(1, 4, 1, 1)
    heads[:, 1, 5, 3] = False
    for mask, told in (
        (plain.triu(-5), "must be causal, with padding or packed documents: give attention_mask"),
        (later, "must be causal, with padding or packed documents: give attention_mask"),
        (torch.randn(1, 1, 40, 40), "must be 0 where a key is seen, and -inf where it is not"),
        (heads, "must be the same for all heads: give attention_mask"),
        (later[..., :20], r"must have shape \[1, S\] or \[1, 1, 40, 40\], got a torch.bool"),
        (torch.ones(1, 39), r"attention_mask must have shape \[1, 40\], got \[1, 39\]"),
    ):
        with pytest.raises(ValueError, match=told):
            model(text, attention_mask=mask)
    for one in (model, native("index")):
        cache = dynamic(one)
        call(one, text[:, :7], cache)
        with pytest.raises(ValueError, match=r"must have shape \[1, S\] or \[1, 1, 1, 8\]"):
            mask = torch.ones(1, 1, 1, 16, dtype=torch.int16)
            call(one, text[:, 7:8], cache, attention_mask=mask, position_ids=torch.tensor([[7]]))


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
