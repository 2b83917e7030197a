"""Models of transformers with random weights, small enough for a CPU. Built from configurations,
they need no network."""

import pytest
import torch

from tests.helpers.sizes import sizes

transformers = pytest.importorskip("transformers", reason="needs the extra hf")

SIZES = dict(
    vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=2, head_dim=8, max_position_embeddings=256,
    initializer_range=0.3,  # attention that is not uniform
    bos_token_id=None, eos_token_id=None, pad_token_id=0,
)  # fmt: skip

MIXED = dict(sliding_window=8, layer_types=["sliding_attention", "full_attention"])
LLAMA3 = dict(
    rope_type="llama3", rope_theta=1e4, factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0,
    original_max_position_embeddings=32,
)  # fmt: skip
YARN = dict(rope_type="yarn", rope_theta=1e4, factor=8.0, original_max_position_embeddings=32)

# what each adds: grouped heads and a scaled RoPE, biases, norms of queries and keys, layers with a
# window, soft caps, scales of its own, partial RoPE, sinks
FAMILIES = dict(
    Llama=dict(rope_parameters=LLAMA3),
    Mistral=dict(sliding_window=None, rope_parameters=YARN),
    Mixtral=dict(sliding_window=None, num_local_experts=2, num_experts_per_tok=1),
    Qwen2=dict(use_sliding_window=True, sliding_window=8, max_window_layers=1),
    Qwen2Moe=dict(
        use_sliding_window=True, sliding_window=8, num_experts=2, num_experts_per_tok=1,
        moe_intermediate_size=16, shared_expert_intermediate_size=16,
    ),
    Qwen3={},
    Qwen3Moe=dict(num_experts=2, num_experts_per_tok=1, moe_intermediate_size=16),
    Gemma={},
    Gemma2=dict(sliding_window=8, attn_logit_softcapping=5.0, query_pre_attn_scalar=20),
    Gemma3=dict(MIXED, query_pre_attn_scalar=20),
    Phi=dict(partial_rotary_factor=0.5),
    Phi3={},
    SmolLM3={},
    Granite=dict(attention_multiplier=0.2),
    Olmo2={},
    Cohere2=MIXED,
    GptOss=dict(
        sliding_window=8, num_local_experts=2, num_experts_per_tok=1,
        rope_parameters=dict(rope_type="default", rope_theta=1e4),
    ),
)  # fmt: skip

# true sparsity at 40 tokens: 3 blocks of 4 of up to 10
SPARSE = sizes(s=4, n=1, num_initial_blocks=1, num_local_blocks=1, dense_length=0)
# all blocks, selected one by one: with differentiable top-k nothing is dense by itself
WHOLE = dict(selection_block_size=4, num_selected_blocks=20, dense_length=0, use_diff_topk=True)

# forms of a model of this library: three branches, one softmax, and one with a learned ranking
FORMS = dict(
    branches=sizes(8, 4, 8, n=1, w=6, preset="paper", num_local_blocks=1),
    one_softmax=dict(preset="one-softmax", **SPARSE),
    index=dict(preset="one-softmax", importance="index", **SPARSE),
)  # fmt: skip


def of_parts(**sizes):
    """A tiny model of text and images, whose decoder is a Gemma3."""
    text = dict(SIZES, layer_types=["full_attention"] * 2, sliding_window=8) | sizes
    vision = dict(SIZES, image_size=32, patch_size=8)
    config = transformers.Gemma3Config(text_config=text, vision_config=vision, image_token_id=60)
    return transformers.Gemma3ForConditionalGeneration(config).eval()


def tiny(family="Llama", **settings):
    """A model of a family, in inference mode."""
    kind = "TextConfig" if family == "Gemma3" else "Config"
    config = getattr(transformers, family + kind)
    torch.manual_seed(0)
    settings = {**SIZES, **FAMILIES[family], **settings}
    model = getattr(transformers, f"{family}ForCausalLM")(config(**settings)).eval()
    if family == "Gemma2":  # some versions take sdpa, which has no soft cap, and ignore the cap
        model.set_attn_implementation("eager")
    for layer in model.model.layers:
        if hasattr(layer.self_attn, "sinks"):
            torch.nn.init.normal_(layer.self_attn.sinks)
    return model


def native(form="branches", **settings):
    """A model of this library, in inference mode."""
    from native_sparse_attention.hf import NSAForCausalLM, NSAModelConfig

    torch.manual_seed(0)
    nsa = FORMS[form] if isinstance(form, str) else form
    return NSAForCausalLM(NSAModelConfig(**SIZES | dict(nsa=nsa) | settings)).eval()


def moved(model):
    """The model, away from the weights that it began with."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    return model


def close(actual, expected, tol=1e-4, **options):
    torch.testing.assert_close(actual, expected, atol=tol, rtol=tol, **options)


def gradients(model, batch, **given):
    """What a model gives, and by name the gradients of its loss."""
    model.zero_grad()
    torch.manual_seed(3)  # of the queries of a ranking
    out = model(**batch, **given)
    out.loss.backward()
    return out, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def prompts(*lengths):
    """Random tokens [1, length] for each length."""
    return [torch.randint(1, SIZES["vocab_size"], (1, length)) for length in lengths]


def checkpoint(model, reentrant=False):
    """Checkpoint a model's layers in training."""
    enable = getattr(model, "activation_checkpointing_enable", None)  # since 5.24
    (enable or model.gradient_checkpointing_enable)(dict(use_reentrant=reentrant))
