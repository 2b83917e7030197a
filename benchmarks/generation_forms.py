"""The forms of attention that `generation.py` compares, and models and caches of each."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import torch

# tokens of the blocks
INITIAL, LOCAL, RANKED = 64, 512, 512
# of SDPA without a mask
CAUSAL = "sdpa_causal"


@dataclasses.dataclass(frozen=True)
class Form:
    """A way to attend. Without settings it is SDPA; `cudnn`: SDPA may choose cuDNN; `converted`:
    `convert` replaces the layers, else `use_sparse_attention` changes how they attend."""

    name: str
    settings: dict[str, Any] | None = None
    cudnn: bool = True
    converted: bool = False

    def described(self, model: Any) -> dict[str, Any] | None:
        """All settings of a model of this form; None for SDPA."""
        from native_sparse_attention.hf.settings import settings_of

        if self.settings is None:
            return None
        return model.config.nsa_converted if self.converted else settings_of(model.config)

    @contextlib.contextmanager
    def chosen(self) -> Iterator[None]:
        """SDPA chooses among its backends."""
        before = torch.backends.cuda.cudnn_sdp_enabled()
        torch.backends.cuda.enable_cudnn_sdp(before and self.cudnn)
        try:
            yield
        finally:
            torch.backends.cuda.enable_cudnn_sdp(before)


def forms_of(sizes: Sequence[int], local: int = LOCAL, ranked: int = RANKED) -> tuple[Form, ...]:
    """All forms, with blocks of these sizes.

    Raises:
        ValueError: a size that does not divide the tokens of the blocks.
    """
    found = [Form("sdpa"), Form("sdpa without cuDNN", cudnn=False)]
    for s in sizes:
        if s < 4 or any(tokens % s for tokens in (INITIAL, local, ranked)):
            raise ValueError(f"s must divide {INITIAL}, {local} and {ranked}, got {s}")
        blocks = dict(
            selection_block_size=s, num_initial_blocks=INITIAL // s, num_local_blocks=local // s,
            num_selected_blocks=ranked // s, dense_length=0,
        )  # fmt: skip
        windows = dict(compress_block_size=s, compress_block_sliding_stride=s)
        found.append(Form(f"max of {s}", blocks | dict(importance="max")))
        found.append(Form(f"means of {s}", blocks | windows | dict(importance="logits")))
        by_head = dict(importance="max", query_heads_share_selected_kv=False)
        found.append(Form(f"max of {s} by each head", blocks | by_head))
        found.append(Form(f"converted, {s}", blocks | dict(importance="index"), converted=True))
    return (*found, Form("defaults", {}), Form("converted, defaults", {}, converted=True))


def copied(network: Any) -> Any:
    """A copy of its modules, with the weights themselves."""
    shared = {id(t): t for t in (*network.parameters(), *network.buffers())}
    return copy.deepcopy(network, shared)


def under(form: Form, network: Any) -> Any:
    """The model with a form of attention: `copied`, but for converted layers."""
    from native_sparse_attention.hf import convert, use_sparse_attention

    model = copied(network)
    model.set_attn_implementation("sdpa")
    model.generation_config.eos_token_id = None  # no call ends early
    if form.settings is None:
        return model
    return (convert if form.converted else use_sparse_attention)(model, form.settings)


def without_mask(model: Any) -> Any:
    """The model (`copied`) under `is_causal` of SDPA, as an eager forward without padding has it.
    Some releases of transformers make a mask in a compiled one, under which SDPA is slower."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    AttentionInterface.register(CAUSAL, sdpa_attention_forward)
    AttentionMaskInterface.register(CAUSAL, lambda *args, **given: None)
    model = copied(model)
    model.set_attn_implementation(CAUSAL)
    return model


@functools.cache
def cache_argument() -> str:
    """The name of a cache, which newer releases change."""
    import inspect

    from transformers import LlamaForCausalLM

    known = inspect.signature(LlamaForCausalLM.forward).parameters
    return "cache" if "cache" in known else "past_key_values"


def new_cache(form: Form, model: Any) -> Any:
    from transformers import DynamicCache

    from native_sparse_attention.hf import SparseCache

    if form.settings is None or form.converted:
        return DynamicCache(config=model.config)
    return SparseCache(model.config)


def static_cache(form: Form, model: Any, length: int) -> Any:
    """A static cache of windows of several tokens, which keeps them; None for what transformers
    makes."""
    from native_sparse_attention.hf import StaticSparseCache

    if form.converted or (form.settings or {}).get("compress_block_size", 1) == 1:
        return None
    return StaticSparseCache(model.config, max_cache_len=length)
