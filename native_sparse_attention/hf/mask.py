"""Which keys the queries of a forward may see, beside causality.

transformers makes one mask for all layers of a forward and passes it to each, as it passes the
`BlockMask` of flex_attention. For "nsa" it is an `NSAMask`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.masking_utils import causal_mask_function, sdpa_mask
from transformers.utils import TransformersKwargs

from .. import varlen
from ..checks import INDEX_DTYPES, INTEGER_DTYPES, check_keywords, check_tensor, describe, refusal
from .configuration import CONVERTED_KEY, KEY, NAME, drop_in_config, drop_in_settings

HINT = "give attention_mask [B, S], or documents with use_cache=False and without this mask"
# options of a forward that name documents
DOCUMENTS = "cu_seq_lens_q", "cu_seq_lens_k", "seq_idx"
# what a layer may ask for in vain
REFUSED = {
    "dropout": "attention_dropout must be 0 with sparse attention, got {}: set it, or model.eval()",
    "output_attentions": "output_attentions must be False with sparse attention, got {}",
    "position_bias": "position_bias must be None with sparse attention, got a bias of logits",
}
# what models pass to their layers, or on from their callers
KNOWN = {
    *TransformersKwargs.__annotations__, *REFUSED, *DOCUMENTS, "position_ids", "shift_labels",
    "use_cache",
}  # fmt: skip


@dataclass(eq=False)
class NSAMask:
    """What a forward knows of its S keys. The T queries are the last of the first `length` keys and
    see no later ones. All layers share it, and with it what one of them has computed from it.

    Attributes:
        length: keys that are written: an int, or in a step over a static cache a tensor [].
        tokens: bool [B, L], True for tokens and False for padding and for keys that are not
            written, of the first L keys; None without padding.
        documents: integers [B, T], equal within a packed document; None for one document a row.
        visible: bool [B, 1, T, S], which keys each query sees, of layers that run in SDPA.
        window: tokens of the window of layers with a window.
        least_position: with a tensor as length, a position that no query is before.
        has_positions: whether positions are known to be those of the tokens of one document.
        block_indices: of layers that rank for others, by their index: a layer that is computed
            again, for its gradients, reads what it read before.
    """

    length: Any
    tokens: Any = None
    documents: Any = None
    visible: Any = None
    window: int | None = None
    least_position: int = 0
    has_positions: bool = False
    block_indices: dict[int, Tensor] = field(default_factory=dict, repr=False)

    # a mask of layers, as of four axes: transformers makes those from masks of two
    ndim = 4

    def __post_init__(self) -> None:
        # no field: FSDP walks those of its modules' arguments, and a result may be the mask itself
        self.results: dict[Any, Any] = {}

    @property
    def shape(self) -> tuple[Any, ...]:
        return 1, 1, self.length, self.length

    @property
    def dtype(self) -> Any:
        got = "one that reads values of its mask: use_dense_attention(model) computes it"
        raise refusal("model", "one that leaves masks to its attention function", got=got)

    def __getitem__(self, index: Any) -> NSAMask:
        """The mask of the last queries, as models write `mask[:, :, -n:, :]`."""
        return self if self.visible is None else replace(self, visible=self.visible[index])

    def to(self, device: Any, *args: Any, **kwargs: Any) -> NSAMask:
        """The mask on the device of a layer, as accelerate asks for it."""
        tensors = {name: t for name, t in vars(self).items() if isinstance(t, Tensor)}
        moved: dict[str, Any] = {name: t.to(device) for name, t in tensors.items()}
        is_unmoved = all(t is tensors[name] for name, t in moved.items())
        return self if is_unmoved else replace(self, **moved)

    def share(self, compute: Callable[..., Any], *args: Any) -> Any:
        """`compute(self, *args)`, for all layers that share the mask."""
        if torch.compiler.is_compiling():
            return compute(self, *args)
        key = compute, args
        if key not in self.results:
            self.results[key] = compute(self, *args)
        return self.results[key]

    def has_slots(self) -> bool:
        """Whether tokens have the positions of their slots. In a graph the host does not look."""
        if self.visible is not None or self.documents is not None:
            return False
        if self.tokens is None or torch.compiler.is_compiling():
            return True
        return not bool((self.tokens[:, 1:] & ~self.tokens[:, :-1]).any())

    def shared_indices(self, layer: int, device: Any) -> Tensor:
        """The block indices that a layer has ranked in this forward."""
        if layer not in self.block_indices:
            got = f"one without block indices of layer {layer}: call the whole model"
            raise ValueError(f"attention_mask must be of all layers with share_ranking, got {got}")
        return self.block_indices[layer].to(device)

    def layout(self, step: int) -> varlen.Layout:
        """Rows in which each sequence or document begins at a multiple of `step`."""
        rows = self.documents if self.tokens is None else self.tokens
        return varlen.layout(
            tuple(rows.shape), rows.device, step, segment_ids=self.documents, mask=self.tokens
        )

    def earlier_tokens(self, B: int, T: int) -> list[int]:
        """Tokens before the T queries, of each of B rows."""
        slots = int(self.length) - T
        return [slots] * B if self.tokens is None else self.tokens[:, :slots].sum(1).tolist()

    def new_tokens(self, T: int) -> tuple[Tensor, bool]:
        """Which of the T queries are tokens, [B, T], and whether the host knows that all are."""
        slots = torch.arange(T, device=self.tokens.device) + (self.length - T)
        real = self.tokens.index_select(1, slots)
        return real, not torch.compiler.is_compiling() and bool(real.all())

    def compact(self, T: int) -> tuple[Any, Any, Any, Tensor, int]:
        """The moves (of `varlen.Move`) of T queries and of keys to their positions without padding;
        tokens before the queries, [B] or 0, and among them; the fewest before them in any row."""
        keys = compaction(self.tokens)
        if isinstance(self.length, int) and self.length == T:
            return keys, keys, 0, self.tokens.sum(1), 0
        real = self.new_tokens(T)[0]
        counts = real.sum(1)
        starts = self.tokens.sum(1) - counts
        first = 0 if torch.compiler.is_compiling() else int(starts.min())
        return compaction(real), keys, starts, counts, first


def compaction(real: Tensor) -> tuple[Tensor, Tensor]:
    """The move (source and target of `varlen.Move`) that puts the real tokens [B, n] first."""
    order = varlen.real_first(real)
    slots = torch.arange(real.shape[1], device=real.device)
    source = order.where(slots < real.sum(1, keepdim=True), -1)
    return source, order.argsort(dim=1).where(real, -1)


def check_call(
    module: Any, mask: Any, rows: tuple[int, int], device: Any, options: Mapping[str, Any]
) -> NSAMask:
    """Check that a layer asks for what sparse attention has, for [B, T] tokens. Returns its mask
    with the documents of the call."""
    for name, message in REFUSED.items():
        value = options.get(name)
        if isinstance(value, Tensor) or value:
            raise ValueError(message.format(value))
    check_keywords([name for name, value in options.items() if value is not None], KNOWN)
    check_tensor("position_ids", options.get("position_ids"), INTEGER_DTYPES, device)
    is_causal = options.get("is_causal")
    if not (getattr(module, "is_causal", True) if is_causal is None else is_causal):
        got = f"False in {type(module).__name__}"
        raise refusal("is_causal", "True with sparse attention", got=got)
    if not isinstance(mask, NSAMask):
        got = f"{describe(mask)}: {HINT}"
        raise refusal("attention_mask", "[B, S] with sparse attention", got=got)
    for name in DOCUMENTS:
        shape = rows if name == "seq_idx" else None
        check_tensor(name, options.get(name), INDEX_DTYPES, device, shape)
    values = [options.get(name) for name in ("use_cache", "position_ids", *DOCUMENTS)]
    return mask.share(name_documents, rows, device, *values)  # type: ignore[no-any-return]


def name_documents(
    mask: NSAMask, rows: tuple[int, int], device: Any, is_cached: Any, positions: Any, *values: Any
) -> NSAMask:
    """The mask with the documents of rows [B, T] that a call names, in which positions count up by
    1: transformers looks for packed ones without a cache alone. A graph checks no values."""
    is_traced, documents, first, T = torch.compiler.is_compiling(), mask.documents, "", rows[1]
    for name, ids in zip(DOCUMENTS, values, strict=True):
        if ids is None:
            continue
        if is_cached or mask.visible is not None or mask.length != T:
            raise ValueError(f"{name} must be None over a cache, got documents: {HINT}")
        if name != "seq_idx":
            bounds = [0, T] if is_traced else ids.tolist()
            if rows[0] != 1 or ids.ndim != 1 or sorted([0, *bounds[1:-1], T]) != bounds:
                got = f"{describe(bounds)} for {list(rows)} tokens"
                raise ValueError(f"{name} must rise from 0 to the tokens of one row, got {got}")
            ids = torch.bucketize(torch.arange(T, device=device), ids.long(), right=True)[None]
        if first and not is_traced and not (ids.diff() != 0).equal(documents.diff() != 0):
            raise ValueError(f"{name} must name the documents of {first}, got others")
        documents, first = ids, first or name
    if T > 1 and positions is not None and not (is_traced or mask.has_positions):
        jumps = positions[..., 1:] - positions[..., :-1] != 1
        if mask.tokens is not None:
            jumps = jumps & mask.tokens[:, 1 - T :] & mask.tokens[:, -T:-1]
        if documents is not None:
            jumps = jumps & (documents[:, 1:] == documents[:, :-1])
        if bool(jumps.any()):
            expected = "must count up by 1 within each sequence"
            raise ValueError(f"position_ids {expected}, got others: {HINT}")
    return replace(mask, documents=documents) if first else mask


def check_layers(config: Any, name: str) -> None:
    """Check that "nsa" computes every layer of a model of this configuration."""
    kinds = {*(getattr(config, "layer_types", None) or ())}
    # those of MiniMax M3 give their block indices
    if other := sorted(kinds - {"full_attention", "sliding_attention", "minimax_m3_sparse"}):
        expected = "one with layers of full_attention and sliding_attention"
        raise refusal("model", expected, got=f"{name} with {other}")
    if crossed := getattr(config, "cross_attention_layers", None):
        got = f"{name} with cross_attention_layers={[*crossed]}"
        raise ValueError(f"model must be one without cross-attention, got {got}")


def nsa_mask(
    batch_size: int, q_length: int, kv_length: int, q_offset: int | Tensor = 0, kv_offset: int = 0,
    mask_function: Callable[..., Any] = causal_mask_function,
    attention_mask: Tensor | NSAMask | None = None, local_size: int | None = None,
    allow_is_causal_skip: bool = True, use_vmap: bool = False, device: torch.device | str = "cpu",
    config: Any = None, **options: Any,
) -> NSAMask:  # fmt: skip
    """The mask of a forward, as `AttentionMaskInterface` asks for it. Over a cache, layers with a
    window and with padding those of dense attention see what SDPA shows them; so do layers with a
    window where padding lies between tokens.

    Raises:
        ValueError: a mask that is not causal, or with a mask function of the model's own; a model
            with other layers, which `use_sparse_attention` has not seen.
    """
    if isinstance(attention_mask, NSAMask):  # `generate` makes it before a compiled forward
        return attention_mask
    T, S, tracing = q_length, kv_length, torch.compiler.is_compiling()
    if use_vmap or options.get("allow_is_bidirectional_skip") is not None:
        got = "a mask function of the model's own: use_dense_attention(model) computes it"
        raise ValueError(f"attention_mask must be causal, got {got}")
    is_drop_in = getattr(config, KEY, None) and not getattr(config, CONVERTED_KEY, None)
    if not tracing and config is not None:
        check_layers(config, type(config).__name__)
        if is_drop_in and getattr(config, "attn_implementation", None) != NAME:
            # a configuration from a file: nobody has checked it, and the next file needs the name
            saved = getattr(config, KEY)
            setattr(config, KEY, saved | drop_in_settings(config, saved, {}, KEY))
            config.attn_implementation = NAME
    if not tracing and attention_mask is not None:
        shape, sizes = [batch_size, int(q_offset) + T], [*attention_mask.shape]
        if len(sizes) != 2 or sizes[0] not in (1, batch_size) or sizes[1] < shape[1]:
            raise ValueError(f"attention_mask must have shape {shape}, got {sizes}")
    documents = tokens = None
    if not allow_is_causal_skip and T > 1:
        documents = find_documents(mask_function, batch_size, T, q_offset, device)
    key = torch.arange(S, device=device)
    if attention_mask is not None:
        tokens = attention_mask[:, kv_offset : kv_offset + S].to(device, torch.bool)
        tokens = F.pad(tokens, (0, S - tokens.shape[1])).expand(batch_size, -1)
        if not tracing and bool((tokens | (key >= q_offset + T - kv_offset)).all()):
            tokens = None
    is_whole, is_known = T == S and kv_offset == 0, not isinstance(q_offset, Tensor)
    is_last = is_whole or (is_known and q_offset + T == kv_offset + S)
    if is_last and tokens is None and documents is None:
        return NSAMask(S, window=local_size)
    if local_size is None:  # padding over a cache that is short enough for dense attention
        needs_sdpa = not is_whole and tokens is not None and is_drop_in
        needs_sdpa = needs_sdpa and drop_in_config(config).dense_limit >= S
    else:  # a window counts slots, padding between tokens too
        needs_sdpa = not is_whole
        if is_whole and tokens is not None and not tracing:
            begins = tokens & ~F.pad(tokens, (1, 0))[:, :-1]
            needs_sdpa = bool((begins.sum(1) > 1).any())
    if needs_sdpa:
        visible = sdpa_mask(
            batch_size=batch_size, q_length=T, kv_length=S, q_offset=q_offset, kv_offset=kv_offset,
            mask_function=mask_function, attention_mask=attention_mask, device=device,
            allow_is_causal_skip=False,
        )  # fmt: skip
        # wrong positions as in SDPA
        return NSAMask(S, visible=visible, window=local_size, has_positions=True)
    if is_whole:
        return NSAMask(S, tokens, documents, window=local_size)
    if is_known or not (tracing or T == 1):
        L = int(q_offset) + T
        return NSAMask(L, None if tokens is None else tokens[:, :L], window=local_size)
    # one graph of a step serves all lengths, or the two sides of `dense_length`
    length, least_position = torch.as_tensor(q_offset, device=device) + T, 0
    if tokens is None and is_drop_in and not tracing:
        dense_length = drop_in_config(config).dense_length
        least_position = dense_length if int(q_offset) >= dense_length else 0
    tokens = None if tokens is None else tokens & (key < length)
    return NSAMask(length, tokens, window=local_size, least_position=least_position)


@torch.compiler.disable(
    reason="packed sequences are looked for on the host: give attention_mask [B, S]"
)
def find_documents(
    mask_function: Callable[..., Any], B: int, T: int, q_offset: int | Tensor, device: Any
) -> Tensor | None:
    """The documents [B, T] of a mask function: a token that does not see the one before begins
    another. None for one document a row."""
    row = torch.arange(B, device=device)[:, None]
    head = torch.zeros_like(row)
    token = torch.arange(1, T, device=device)[None] + q_offset
    begins = ~torch.as_tensor(mask_function(row, head, token, token - 1), device=device)
    if bool(torch.as_tensor(mask_function(row, head, token - 1, token)).any()):
        got = "one that shows later tokens, as between those of an image"
        raise ValueError(f"attention_mask must be causal, got {got}: {HINT}")
    return F.pad(begins.expand(B, -1), (1, 0)).cumsum(1) if bool(begins.any()) else None
