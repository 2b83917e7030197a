"""Each family of models, under the drop-in and converted: what dense attention gives where all
blocks are selected."""

import copy

import pytest
import torch
import transformers

from native_sparse_attention.hf import attention, convert, use_sparse_attention
from tests.helpers.batches import call_in_pieces, check_rows, dynamic, packed, padded, static
from tests.helpers.sizes import sizes
from tests.helpers.tiny_models import FAMILIES, SPARSE, WHOLE, close, gradients, prompts, tiny

CONVERTED = (
    "Llama", "Mistral", "Qwen2", "Qwen3", "Gemma", "Gemma2", "Gemma3", "Phi", "Phi3", "SmolLM3",
    "Granite", "Mixtral", "Qwen2Moe", "Qwen3Moe",
)  # fmt: skip
# all blocks, under one softmax; and a window over the sequence beside two closed branches
FORMS = dict(
    one_softmax=dict(selection_block_size=4, num_selected_blocks=20, dense_length=0),
    branches=sizes(8, 4, 8, n=1, w=64, branches=("compressed", "selected", "window")),
)  # fmt: skip
family = pytest.mark.parametrize("family", FAMILIES)
converted_family = pytest.mark.parametrize("family", CONVERTED)


def batches(texts):
    """The first text alone, all of them in one row, and with padding on either side."""
    return [dict(input_ids=texts[0]), packed(texts), padded(texts, True), padded(texts, False)]


@family
@torch.no_grad()
def test_all_blocks_are_dense_attention(family):
    model, texts = tiny(family), prompts(33, 40)
    given = batches(texts)
    if family == "GptOss":  # transformers makes its masks without positions
        del given[1]
    dense = [model(**batch, use_cache=False).logits for batch in given]
    for settings in (WHOLE, WHOLE | dict(use_diff_topk=False), dict(selection_block_size=64)):
        use_sparse_attention(model, **settings)
        for batch, expected in zip(given, dense):
            check_rows(model(**batch, use_cache=False).logits, batch, expected)


@pytest.mark.slow(one_of=4)
@pytest.mark.parametrize("form", FORMS)
@converted_family
@torch.no_grad()
def test_converted_model_gives_what_the_original_does(family, form):
    model, texts = tiny(family), prompts(33, 40)
    given = batches(texts)
    given.append({**given[2], "position_ids": None})  # positions that count padding too
    expected = [model(**batch, use_cache=False).logits for batch in given]
    convert(model, **FORMS[form])
    for use_cache in (False, True):
        for batch, dense in zip(given, expected):
            if batch["input_ids"].shape[0] == 2 or not use_cache:
                check_rows(model(**batch, use_cache=use_cache).logits, batch, dense)


@converted_family
@torch.no_grad()
def test_sparse_converted_model_gives_what_the_drop_in_does(family):
    """With the same rule for blocks."""
    model, (text,) = tiny(family), prompts(40)
    settings = SPARSE | dict(importance="max")
    converted, dense = convert(copy.deepcopy(model), **settings), model(text).logits
    expected = use_sparse_attention(model, **settings)(text).logits
    assert (expected - dense).abs().max() > 1e-2, "nothing was sparse"
    close(converted(text).logits, expected)


@family
def test_gradients_are_those_of_dense_attention(family):
    model, (text,) = tiny(family).train(), prompts(24)
    batch = dict(input_ids=text, labels=text, use_cache=False)
    _, expected = gradients(model, batch)
    use_sparse_attention(model, **WHOLE | dict(use_diff_topk=False))
    close(gradients(model, batch)[1], expected, tol=1e-3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, "autocast"])
@torch.no_grad()
def test_half_precision(dtype):
    model, (text,) = tiny(), prompts(40)
    model = model if dtype == "autocast" else model.to(dtype)
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype == "autocast"):
        expected = model(text).logits
        out = use_sparse_attention(model, **WHOLE)(text).logits
    assert out.dtype == expected.dtype
    assert (out - expected).abs().mean() < 0.05 * expected.abs().mean()


@pytest.mark.kernels
@torch.no_grad()
def test_kernels_give_what_eager_gives(monkeypatch):
    """Prefill by the training kernels and steps by the decode kernels, with padding and without."""
    model, texts = tiny("Qwen3", head_dim=16, num_hidden_layers=1), prompts(16, 20)
    use_sparse_attention(model, **SPARSE)
    alone = [model(text).logits for text in texts]
    use_sparse_attention(model, **SPARSE, backend="triton")
    steps, run_decode_kernels = [], attention.decode.run_decode_kernels

    def decode(config, call):
        steps.append(call.q.shape[1])
        return run_decode_kernels(config, call)

    monkeypatch.setattr(attention.decode, "run_decode_kernels", decode)
    batch, pair = padded(texts, left=True), texts[1].repeat(2, 1)
    close(call_in_pieces(model, texts[1], dynamic(model), 0, 19, 20), alone[1])
    check_rows(call_in_pieces(model, batch, static(model), 0, 19, 20), batch, alone)
    # all rows of one length: their starts are one number
    out = call_in_pieces(model, pair, static(model), 0, 19, 20)
    close(out, alone[1].repeat(2, 1, 1))
    assert steps == [1, 1, 1]


@pytest.mark.slow(one_of=2)
@pytest.mark.parametrize("padding", [False, True])
def test_compiled_model(padding):
    """Without a mask the graph breaks where packed documents are looked for."""
    model = use_sparse_attention(tiny(num_hidden_layers=1), **SPARSE)
    texts = prompts(33, 40)
    given = padded(texts, left=True) if padding else dict(input_ids=texts[1])
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="eager", fullgraph=padding)
    expected = model(**given, use_cache=False).logits
    close(compiled(**given, use_cache=False).logits, expected)


def test_outputs_that_models_view():
    config = transformers.JetMoeConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=1,
        num_key_value_heads=2, kv_channels=8, num_local_experts=2, num_experts_per_tok=2,
    )  # fmt: skip
    model, (text,) = transformers.JetMoeForCausalLM(config).eval(), prompts(40)
    expected = model(text).logits
    close(use_sparse_attention(model)(text).logits, expected)


@torch.no_grad()
def test_layers_that_share_keys_and_leave_out_queries():
    """In a padded prefill they see the last token's query alone."""
    kind = getattr(transformers, "Gemma4ForCausalLM", None)
    if kind is None:
        pytest.skip("needs Gemma4")
    types = 2 * ["sliding_attention", "full_attention", "full_attention"]
    config = transformers.Gemma4TextConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=6,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8, global_head_dim=8,
        sliding_window=8, layer_types=types, num_kv_shared_layers=3, pad_token_id=0,
        hidden_size_per_layer_input=8, vocab_size_per_layer_input=64, initializer_range=0.3,
    )  # fmt: skip
    torch.manual_seed(0)
    model, batch = kind(config).eval(), padded(prompts(23, 30), True)
    given = dict(batch, max_new_tokens=5, do_sample=False)
    expected = model.generate(**given)
    assert torch.equal(use_sparse_attention(model).generate(**given), expected)
