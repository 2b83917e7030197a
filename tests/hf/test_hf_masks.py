"""Masks: what a forward knows of its keys, masks of the user, and what a mask costs."""

import traceback
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.masking_utils import causal_mask_function

from native_sparse_attention.hf import convert, use_sparse_attention
from native_sparse_attention.hf.mask import nsa_mask
from tests.helpers.batches import CACHE, call, call_in_pieces, dynamic, static
from tests.helpers.tiny_models import SPARSE, close, native, prompts, tiny


@pytest.fixture(scope="module")
def model():
    return use_sparse_attention(tiny(), **SPARSE)


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
    out = call_in_pieces(model, dict(input_ids=ids, **given), dynamic(model), 0, 14, 40)
    close(out[:, real], expected)


BOUNDS = torch.tensor([0, 13, 31])


@pytest.mark.parametrize(
    "given, message",
    [
        (dict(cu_seq_lens_q=BOUNDS, cu_seq_lens_k=BOUNDS + 1), "cu_seq_lens_k must rise from 0 to"),
        (dict(cu_seq_lens_q=BOUNDS, cu_seq_lens_k=BOUNDS[[0, 2]]), "cu_seq_lens_k must name the"),
        (dict(cu_seq_lens_q=BOUNDS[:2]), r"cu_seq_lens_q must .* one row, got \[0, 13\] for \[1"),
        (dict(cu_seq_lens_q=BOUNDS.float()), "cu_seq_lens_q must be int32 or int64"),
        (dict(cu_seq_lens_q=BOUNDS, rows=2), r"cu_seq_lens_q must .* for \[2, 31\] tokens"),
        (dict(cu_seq_lens_q=BOUNDS, use_cache=True), "cu_seq_lens_q must be None over a cache"),
        (dict(cu_seq_lens_q=BOUNDS, seq_idx=torch.arange(31)[None]), "seq_idx must name the docum"),
        (dict(seq_idx=torch.arange(31)), r"seq_idx must be int.* of shape \[1, 31\]"),
        (dict(seq_idx=torch.zeros(1, 31).int(), position_ids=torch.arange(31)[None] % 20),
         "position_ids must count up by 1 within each sequence"),
        (dict(cu_seq_lens_q=[0, 31]), r"cu_seq_lens_q must be int32 or int64 on cpu, got"),
        (dict(position_ids=torch.rand(1, 31)), "position_ids must be integers on cpu, got"),
        # of the functions of this library, and of nobody
        (dict(segment_ids=BOUNDS[None]), "unexpected keyword argument 'segment_ids'"),
        (dict(documents=BOUNDS), "unexpected keyword argument 'documents'"),
        (dict(head_mask=BOUNDS), "unexpected keyword argument 'head_mask'"),
    ],
)  # fmt: skip
@torch.no_grad()
def test_documents_that_contradict_are_refused(model, given, message):
    given = dict(use_cache=False) | given
    ids = prompts(31)[0].expand(given.pop("rows", 1), -1)
    for one in (model, native("index"), convert(tiny(), **SPARSE)):
        with pytest.raises(ValueError, match=message):
            one(ids, **given)


@torch.no_grad()
def test_packed_sequences_go_over_no_cache(model):
    """transformers looks for them without one."""
    (ids,), message = prompts(31), "position_ids must count up by 1 within each sequence"
    positions = torch.cat((torch.arange(13), torch.arange(18)))[None]
    for one in (model, native("index"), convert(tiny(), **SPARSE)):
        cache = dynamic(one)
        call(one, ids[:, :8], cache, position_ids=positions[:, :8])
        for given in (
            {CACHE: cache, "input_ids": ids[:, 8:], "position_ids": positions[:, 8:]},
            dict(input_ids=ids, position_ids=positions, use_cache=True),
        ):
            with pytest.raises(ValueError, match=message):
                one(**given)
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
    (text,), mask = prompts(40), torch.ones(1, 1, 40, 40, dtype=torch.bool).tril()
    for one in (model, native("index")):
        with pytest.raises(
            ValueError, match=r"must be \[B, S\] with sparse attention, got a torch"
        ):
            one(text, attention_mask=mask)
        for shape in ((1, 39), (40,), (1, 40, 40)):
            with pytest.raises(ValueError, match=r"attention_mask must have shape \[1, 40\]"):
                one(text, attention_mask=torch.ones(shape))


def test_mask_functions_of_a_model_are_refused():
    given = dict(batch_size=1, q_length=5, kv_length=5)
    with pytest.raises(ValueError, match="got a mask function of the model's own"):
        nsa_mask(**given, mask_function=causal_mask_function, use_vmap=True)

    def image(b, h, q, k):
        return causal_mask_function(b, h, q, k) | (k < 3)

    with pytest.raises(ValueError, match="must be causal, got one that shows later tokens"):
        nsa_mask(**given, mask_function=image, allow_is_causal_skip=False)
