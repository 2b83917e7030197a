"""Which keys the queries of a forward may see, beside causality.

transformers makes one mask for all layers of a forward and passes it to each, as it passes the
`BlockMask` of flex_attention. For "nsa" it is None (all keys are tokens of one document, and the
queries are the last of them), or an `NSAMask`. A mask [B, 1, T, S] of the user becomes one of both.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary
from transformers.masking_utils import causal_mask_function, sdpa_mask

from .. import varlen
from ..checks.scalars import shown
from .settings import KEY, drop_in_settings

HINT = (
    "give attention_mask [B, S], 1 for tokens and 0 for padding, or position_ids that begin at 0 "
    "in each packed document"
)
# a smaller number, added to a logit, hides the key
HIDDEN = -1e4
# kinds of layers that "nsa" computes
LAYER_TYPES = {"full_attention", "sliding_attention"}


@dataclass(eq=False)
class NSAMask:
    """What a forward knows of its S keys. The T queries are the last of the first `length` keys and
    see no later ones. All layers share it, and with it what one of them has computed from it.

    Attributes:
        length: keys that are written: an int, or in a step over a static cache a tensor [] that the
            host does not read.
        tokens: bool [B, L], True for tokens and False for padding and for keys that are not
            written, of the first L keys; None without padding.
        documents: integers [B, L], equal within a packed document; None for one document a row.
        past_dense_length: whether the host knows that all queries are past `dense_length`.
        has_positions: whether positions are known to be those of the tokens of one document.
    """

    length: Any
    tokens: Any = None
    documents: Any = None
    past_dense_length: bool = False
    has_positions: bool = False
    results: dict[Any, Any] = field(default_factory=dict, repr=False)

    # a mask of layers, as of four axes: transformers makes those from masks of two
    ndim = 4

    @property
    def shape(self) -> tuple[Any, ...]:
        return 1, 1, self.length, self.length

    @property
    def has_rows(self) -> bool:
        """Whether rows have padding or documents of their own."""
        return self.tokens is not None or self.documents is not None

    def __getitem__(self, index: Any) -> NSAMask:
        """The mask of the last queries, as models write `mask[:, :, -n:, :]`."""
        return self

    def to(self, device: Any, *args: Any, **kwargs: Any) -> NSAMask:
        """The mask on the device of a layer, as accelerate asks for it."""
        names = ("length", "tokens", "documents")
        tensors = {n: t for n in names if isinstance(t := getattr(self, n), Tensor)}
        if all(t.device == torch.device(device) for t in tensors.values()):
            return self
        changes: dict[str, Any] = {name: t.to(device) for name, t in tensors.items()}
        return replace(self, **changes, results={})

    def share(self, compute: Callable[..., Any], *args: Any) -> Any:
        """`compute(self, *args)`, for all layers that share the mask."""
        if torch.compiler.is_compiling():
            return compute(self, *args)
        key = compute, args
        if key not in self.results:
            self.results[key] = compute(self, *args)
        return self.results[key]

    def layout(self, step: int) -> varlen.Layout:
        """Rows in which each sequence or document begins at a multiple of `step`."""
        rows = self.documents if self.tokens is None else self.tokens
        return varlen.layout(
            tuple(rows.shape), rows.device, step, segment_ids=self.documents, mask=self.tokens
        )

    def queries(self, T: int) -> Tensor:
        """Which of the T queries are tokens, [B, T]."""
        slots = torch.arange(T, device=self.tokens.device) + (self.length - T)
        real: Tensor = self.tokens.index_select(1, slots)
        return real

    def step(self, T: int) -> tuple[Any, Any, Tensor, Tensor, int]:
        """Of T queries over a cache with padding: the moves (as of `varlen.Move`) of queries and
        of keys to the positions that they have without it; tokens [B] before the queries, and
        among them; and the fewest before them in any row, if the host may read it."""
        real = self.queries(T)
        counts = real.sum(1)
        starts = self.tokens.sum(1) - counts
        first = 0 if torch.compiler.is_compiling() else int(starts.min())
        return compaction(real), compaction(self.tokens), starts, counts, first

    def visible(self, T: int, S: int, sliding_window: int | None = None) -> Tensor:
        """Which of S keys the last T queries see, bool [B, 1, T, S] if rows differ."""
        rows = self.documents if self.tokens is None else self.tokens
        key = torch.arange(S, device=None if rows is None else rows.device)
        query = key[:T, None] + (self.length - T)
        visible = (key <= query)[None]
        if sliding_window is not None:
            visible = visible & (key > query - sliding_window)
        if self.tokens is not None:
            visible = visible & self.tokens[:, None]
        if self.documents is not None:
            visible = visible & (self.documents[:, None] == self.documents[:, -T:, None])
        return visible[:, None]

    def new_tokens(self, T: int) -> Tensor | None:
        """Which of the last T tokens [B, T] are no padding; None if all are."""
        new = self.tokens[:, -T:]
        return None if bool(new.all()) else new


def compaction(real: Tensor) -> tuple[Tensor, Tensor]:
    """The move that puts the real tokens of rows [B, n] first: `source` and `target` of
    `varlen.Move`."""
    order = varlen.real_first(real)
    slots = torch.arange(real.shape[1], device=real.device)
    source = order.where(slots < real.sum(1, keepdim=True), -1)
    return source, order.argsort(dim=1).where(real, -1)


def layer_types(config: Any) -> list[str]:
    """The kind of each layer; of one layer where all are alike."""
    is_full = getattr(config, "sliding_window", None) is None
    kinds: list[str] | None = getattr(config, "layer_types", None)
    return kinds or ["full_attention" if is_full else "sliding_attention"]


def check_layers(config: Any, name: str) -> None:
    """Check that "nsa" computes every layer of a model of this configuration.

    Raises:
        ValueError: it has layers of other kinds, or cross-attention.
    """
    if kinds := sorted(set(layer_types(config)) - LAYER_TYPES):
        raise ValueError(
            f"model must be one with layers of {' and '.join(sorted(LAYER_TYPES))}, got {name} "
            f"with {kinds}"
        )
    if crossed := getattr(config, "cross_attention_layers", None):
        raise ValueError(
            f"model must be one without cross-attention, got {name} with "
            f"cross_attention_layers={list(crossed)}"
        )


def nsa_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = causal_mask_function,
    attention_mask: Tensor | NSAMask | None = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    use_vmap: bool = False,
    device: torch.device | str = "cpu",
    config: Any = None,
    **options: Any,
) -> NSAMask | Tensor | None:
    """The mask of a forward, as `AttentionMaskInterface` asks for it. Layers with a window get the
    mask [B, 1, T, S] of SDPA over a cache, and where padding lies between tokens.

    Raises:
        ValueError: a mask that is not causal, or with a mask function of the model's own; a model
            with other layers, which `use_sparse_attention` has not seen.
    """
    if isinstance(attention_mask, NSAMask):  # `generate` makes it before a compiled forward
        return attention_mask
    T, S, tracing = q_length, kv_length, torch.compiler.is_compiling()
    if use_vmap or options.get("allow_is_bidirectional_skip") is not None:
        raise ValueError(
            "attention_mask must be causal, with padding or packed documents, got a mask function "
            "of the model's own: use_dense_attention(model) computes it"
        )
    if not tracing and config is not None:
        check_layers(config, type(config).__name__)
    if not tracing and attention_mask is not None:
        shape = (batch_size, int(q_offset) + T)
        rows, width = attention_mask.shape
        if rows not in (1, batch_size) or width < shape[1]:
            raise ValueError(f"attention_mask must have shape {[*shape]}, got {[rows, width]}")
    documents = None
    if not allow_is_causal_skip and T > 1:
        find = documents_uncompiled if tracing else documents_of_function
        documents = find(mask_function, batch_size, T, q_offset, device)
    tokens = None
    if attention_mask is not None:
        tokens = attention_mask[:, kv_offset : kv_offset + S].to(device, torch.bool)
        tokens = F.pad(tokens, (0, S - tokens.shape[1])).expand(batch_size, -1)
    key = torch.arange(S, device=device)
    if tokens is not None and not tracing:
        is_full = bool((tokens | (key >= q_offset + T - kv_offset)).all())
        tokens = None if is_full else tokens
    is_whole, is_known = T == S and kv_offset == 0, not isinstance(q_offset, Tensor)
    if local_size is not None:  # a window counts slots, padding too
        is_last = is_whole or (is_known and q_offset + T == kv_offset + S)
        if tokens is None and documents is None and is_last:
            return None
        has_gaps = False
        if tokens is not None and not tracing:  # padding between tokens of a row
            begins = tokens & ~F.pad(tokens, (1, 0))[:, :-1]
            has_gaps = bool((begins.sum(1) > 1).any())
        if not is_whole or has_gaps:
            return sdpa_mask(
                batch_size=batch_size, q_length=T, kv_length=S, q_offset=q_offset,
                kv_offset=kv_offset, mask_function=mask_function, attention_mask=attention_mask,
                device=device, allow_is_causal_skip=False,
            )  # fmt: skip
    if is_whole:
        is_plain = tokens is None and documents is None
        return None if is_plain else NSAMask(S, tokens, documents)
    if isinstance(q_offset, Tensor) and (tracing or T == 1):
        # one graph of a step serves all lengths, or the two sides of `dense_length`
        length = q_offset.to(device) + T
        if tokens is not None:
            return NSAMask(length, tokens & (key < length))
        counts = not tracing and getattr(config, KEY, None) is not None
        is_past = counts and int(q_offset) >= drop_in_settings(config)["dense_length"]
        return NSAMask(length, past_dense_length=is_past)
    L = int(q_offset) + T
    if tokens is None:
        return None if L == S else NSAMask(L)
    return NSAMask(L, tokens[:, :L])


# packed documents


def documents_of_function(
    mask_function: Callable[..., Any],
    B: int,
    T: int,
    q_offset: int | Tensor,
    device: torch.device | str,
) -> Tensor | None:
    """The documents [B, T] of a mask function: a token that does not see the one before begins
    another. None for one document a row.

    Raises:
        ValueError: tokens see later ones.
    """
    row = torch.arange(B, device=device)[:, None]
    head = torch.zeros_like(row)
    token = torch.arange(1, T, device=device)[None] + q_offset
    sees = torch.as_tensor(mask_function(row, head, token, token - 1), device=device)
    if bool(torch.as_tensor(mask_function(row, head, token - 1, token)).any()):
        raise ValueError(
            "attention_mask must be causal, got one that shows later tokens, as between those of "
            f"an image: {HINT}"
        )
    return number_documents(~sees.expand(B, -1))


def packed_mask(position_ids: Tensor, B: int, cached: int | None) -> NSAMask | None:
    """The mask of B packed rows, by positions [1|B, T] that return to 0; None if they do not.
    `cached`: tokens before these of a cache, which has no packed documents; None without one.

    Raises:
        ValueError: packed documents over a cache.
    """
    begins = position_ids[:, 0 if cached else 1 :] == 0
    if cached is not None and bool(begins.any()):
        raise ValueError(
            f"position_ids over a cache must not return to 0 after {cached} tokens, got "
            f"{shown(position_ids.tolist())}: a cache keeps no packed sequences, give "
            "use_cache=False"
        )
    documents = None if cached is not None else number_documents(begins.expand(B, -1))
    return None if documents is None else NSAMask(position_ids.shape[1], documents=documents)


documents_uncompiled = torch.compiler.disable(
    documents_of_function,
    reason="packed sequences are looked for on the host: give attention_mask [B, S]",
)


def number_documents(begins: Tensor) -> Tensor | None:
    """The documents [B, T] of rows, by where tokens after the first begin one, [B, T - 1]; None for
    one document a row."""
    return F.pad(begins, (1, 0)).cumsum(1) if bool(begins.any()) else None


# what the user gives: tensors that all layers of a forward share

RESULTS: Any = WeakTensorKeyDictionary()


def share(compute: Callable[..., Any], tensor: Tensor, *args: Any) -> Any:
    """`compute(tensor, *args)`, once for the layers of a forward. A tensor of inference mode counts
    no writes, and is read anew."""
    if torch.compiler.is_compiling() or tensor.is_inference():
        return compute(tensor, *args)
    call = compute, args, tensor._version
    earlier, result = RESULTS.get(tensor, (None, None))
    if earlier != call:
        result = compute(tensor, *args)
        RESULTS[tensor] = call, result
    return result


def read_mask(
    mask: Any, position_ids: Any, B: int, T: int, S: int, has_past: bool = False
) -> NSAMask | None:
    """The mask of T queries and S keys that transformers passes or the user gives; without either,
    that of packed documents which positions tell. transformers looks for these without a cache
    alone; a graph cannot look.

    Args:
        has_past: whether keys of a cache precede these, which has no packed documents.

    Raises:
        ValueError: neither an `NSAMask` nor a tensor of padding or packed documents.
    """
    if mask is not None and not isinstance(mask, NSAMask):
        if not isinstance(mask, Tensor):
            raise ValueError(f"attention_mask must be a tensor [{B}, S], got {shown(mask)}")
        mask = share(mask_of_tensor, mask, B, T, S)
    is_step = T == 1 or (mask is not None and isinstance(mask.length, Tensor))
    if is_step or (mask is not None and mask.has_rows) or torch.compiler.is_compiling():
        return mask
    if not isinstance(position_ids, Tensor) or position_ids.shape[1:] != (T,):
        return mask
    cached = None if not has_past else (S if mask is None else mask.length) - T
    return share(packed_mask, position_ids, B, cached) or mask


def mask_of_tensor(mask: Tensor, B: int, T: int, S: int) -> NSAMask | None:
    """The mask that a tensor [B, 1, T, S] of the user says: bool or integers, not 0 to see, or
    floats, 0 to see and a large negative number not to.

    Raises:
        ValueError: not such a mask, or one of neither padding nor packed documents.
    """
    if mask.ndim != 4 or mask.shape[0] not in (1, B) or mask.shape[2:] != (T, S):
        raise ValueError(
            f"attention_mask must have shape [{B}, S] or [{B}, 1, {T}, {S}], got {shown(mask)}"
        )
    visible = mask != 0
    if mask.is_floating_point():
        visible = mask > HIDDEN
        if bool((visible & (mask != 0)).any()):
            raise ValueError(
                "attention_mask of floats must be 0 where a key is seen, and -inf where it is not, "
                f"got other numbers, which bias logits: {HINT}"
            )
    if bool((visible != visible[:, :1]).any()):
        raise ValueError(f"attention_mask must be the same for all heads: {HINT}")
    visible, documents, lengths = visible[:, 0], None, [S]
    tokens = visible.any(1)
    if T == S:
        tokens = visible.diagonal(dim1=1, dim2=2)
        begins = ~visible[:, 1:, :-1].diagonal(dim1=1, dim2=2) & tokens[:, 1:] & tokens[:, :-1]
        documents = number_documents(begins.expand(B, -1))
    else:  # last keys that no query sees are not written yet, in a static cache, or padding
        last = tokens.any(0).nonzero()[-1:]
        lengths = [max(T, *(last[:, 0] + 1).tolist(), 0), S]
    for L in lengths:
        result = NSAMask(L, tokens[:, :L].expand(B, -1), documents)
        is_wrong = visible[..., :L] != result.visible(T, L)[:, 0]
        if not bool((is_wrong & tokens[:, L - T : L, None]).any()):
            break
    else:
        raise ValueError(
            f"attention_mask [B, 1, T, S] must be causal, with padding or packed documents: {HINT}"
        )
    if documents is None and bool(tokens[:, :L].all()):
        return None if L == S else NSAMask(L)
    return result
