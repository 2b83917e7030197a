"""Which keys the queries of a call may see, beside causality.

transformers makes one mask for all layers of a forward and passes it to each. For layers that
attend sparsely it is small, linear in the number of keys:

    None                  all S keys; the queries are the last T of them
    int16 [0, 1, 1, L]    the first L of the S keys of a static cache; the queries are their last T
    int64 [1|2, 1, 1, 1]  as many of the S keys as its value, which the host does not know; 2 where
                          the queries are past `dense_length`
    int16 [B, 1, 1, L]    for each of the first L keys 1 (a token), 0 (padding) or -1 (not written)
    int16 [B, 1, 2, L]    the same, and 1 where a packed document begins

Between layers an int16 mask of B rows is padded with -1 to S + MORE columns, which tells it from
masks [B, 1, T, S] of the user, of any dtype. Those become one of these forms.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary
from transformers.masking_utils import causal_mask_function, sdpa_mask

from ..checks.scalars import shown
from .settings import KEY, check_supported, settings_of

HINT = (
    "give attention_mask [B, S], 1 for tokens and 0 for padding, or position_ids that begin at 0 "
    "in each packed document"
)
# added to a logit, it hides the key
HIDDEN = -1e4

# columns of a mask between layers that no mask of the user has
MORE = 3

# of a mask, or of positions, that all layers of a forward share: what each would find out again
RECEIVED: Any = WeakTensorKeyDictionary()
OVER: Any = WeakTensorKeyDictionary()
CONVERTED: Any = WeakTensorKeyDictionary()
LAYOUTS: Any = WeakTensorKeyDictionary()
STARTS: Any = WeakTensorKeyDictionary()


def remembered(memory: Any, mask: Tensor, function: Any, args: tuple[Any, ...]) -> Any:
    """`function(mask, *args)`, found once for the layers that share a mask. Of the user's tensors
    of inference mode, which count no writes, it is found anew."""
    if torch.compiler.is_compiling():
        return function(mask, *args)
    at = at_of(mask, args)
    found = memory.get(mask)
    fresh = at[1] is None and (memory is CONVERTED or memory is OVER)
    if found is None or found[0] != at or fresh:
        found = memory[mask] = at, function(mask, *args)
    return found[1]


def at_of(mask: Tensor, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Of which state of a mask: writes in place make another one."""
    return args, None if mask.is_inference() else mask._version


def sparse_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = causal_mask_function,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    use_vmap: bool = False,
    device: torch.device | str = "cpu",
    **others: Any,
) -> Tensor | None:
    """The mask of a forward, as `AttentionMaskInterface` asks for it.

    Raises:
        ValueError: a mask that is not causal, or with a mask function of the model's own; a model
            with other layers, which `use_sparse_attention` has not seen.
    """
    if use_vmap or others.get("allow_is_bidirectional_skip") is not None:
        raise ValueError(
            "attention_mask must be causal, with padding or packed documents, got a mask function "
            "of the model's own: use_dense_attention(model) computes it"
        )
    T, S = q_length, kv_length
    if attention_mask is not None and not isinstance(attention_mask, Tensor):
        raise ValueError(f"attention_mask must be a tensor, got {shown(attention_mask)}")
    tracing, config = torch.compiler.is_compiling(), others.get("config")
    if config is not None and not tracing:
        check_supported(config, type(config).__name__)
    if attention_mask is not None and not tracing:
        least = int(q_offset) + T
        if attention_mask.shape[0] not in (1, batch_size) or attention_mask.shape[1] < least:
            raise ValueError(
                f"attention_mask must have shape [{batch_size}, {least}], got "
                f"{list(attention_mask.shape)}"
            )
    dense: dict[str, Any] = dict(
        batch_size=batch_size, q_length=T, kv_length=S, q_offset=q_offset, kv_offset=kv_offset,
        mask_function=mask_function, attention_mask=attention_mask, device=device,
        allow_is_causal_skip=False,
    )  # fmt: skip
    real = None if attention_mask is None else columns(attention_mask, kv_offset, S)
    whole = T == S and kv_offset == 0
    begins = None
    if not allow_is_causal_skip and T > 1:
        find = documents_uncompiled if tracing else document_begins
        begins = find(mask_function, batch_size, T, q_offset, device)
    if real is not None and not tracing and bool(is_full(real, q_offset, T, kv_offset)):
        real = None
    if real is not None and local_size is not None and not tracing and has_gaps(real):
        return sdpa_mask(**dense)  # a window counts slots, padding too
    if whole and (real is not None or begins is not None):
        return passed(encoded(batch_size, S, real, begins, device), S)
    if whole:
        return None
    if local_size is not None:  # the window of a layer that keeps its own
        at_end = not isinstance(q_offset, Tensor) and q_offset + T == kv_offset + S
        return None if real is None and at_end else sdpa_mask(**dense)
    if real is None:
        return unpadded(T, S, q_offset, tracing, device, config)
    if isinstance(q_offset, Tensor) and (tracing or T == 1):
        written = torch.arange(S, device=device) < q_offset.to(device) + T
        return passed(encoded(batch_size, S, real, None, device).where(written, -1), S)
    L = int(q_offset) + T
    return passed(encoded(batch_size, L, real[:, :L], None, device), S)


def columns(attention_mask: Tensor, first: int, count: int) -> Tensor:
    """`count` columns of a mask [B, keys] as bool, from one on; keys past its end are hidden."""
    found = attention_mask[:, first : first + count].bool()
    return torch.nn.functional.pad(found, (0, count - found.shape[1]))


def is_full(real: Tensor, q_offset: int | Tensor, T: int, kv_offset: int) -> Tensor:
    """Whether every key up to the last query is a token."""
    end = q_offset + T - kv_offset
    return (real | (torch.arange(real.shape[1], device=real.device) >= end)).all()


def has_gaps(real: Tensor) -> bool:
    """Whether padding lies between tokens of a row [B, S]."""
    begins = real & ~torch.nn.functional.pad(real, (1, 0))[:, :-1]
    return bool((begins.sum(1) > 1).any())


def unpadded(
    T: int,
    S: int,
    q_offset: int | Tensor,
    tracing: bool,
    device: torch.device | str,
    config: Any = None,
) -> Tensor | None:
    """The mask of S keys without padding, of which the last queries see the first ones."""
    if isinstance(q_offset, Tensor) and (tracing or T == 1):
        # a graph of one step serves all lengths, or the two sides of `dense_length`
        known = not tracing and getattr(config, KEY, None) is not None
        is_past = known and int(q_offset) >= settings_of(config)["dense_length"]
        end = (q_offset.to(device) + T).long().reshape(1, 1, 1, 1)
        return end.repeat(2, 1, 1, 1) if is_past else end
    L = int(q_offset) + T
    return None if L == S else torch.empty(0, 1, 1, L, dtype=torch.int16, device=device)


def encoded(
    B: int, L: int, real: Tensor | None, begins: Tensor | None, device: torch.device | str
) -> Tensor:
    """The mask [B, 1, 1 or 2, L] of tokens and of begins of documents."""
    tokens = torch.ones(B, L, dtype=torch.int16, device=device)
    if real is not None:
        tokens = real.to(device, torch.int16).expand(B, -1)
    rows = [tokens] if begins is None else [tokens, begins.to(torch.int16)]
    return torch.stack(rows, dim=1)[:, None]


def passed(mask: Tensor, S: int) -> Tensor:
    """A mask [B, 1, 1 or 2, L] as layers of S keys get it: `is_own` knows it by its width."""
    wide = torch.nn.functional.pad(mask, (0, S + MORE - mask.shape[-1]), value=-1)
    if not torch.compiler.is_compiling():
        RECEIVED[wide] = at_of(wide, (S,)), mask
    return wide


def received(mask: Tensor, S: int) -> Tensor:
    """The mask that was `passed`, or one as wide as the keys."""
    return mask if mask.shape[-1] < S else remembered(RECEIVED, mask, narrowed, (S,))


def narrowed(mask: Tensor, S: int) -> Tensor:
    return mask[..., :S].clone()  # a view would keep its key in the memory


def document_begins(
    mask_function: Callable[..., Any],
    B: int,
    T: int,
    q_offset: int | Tensor,
    device: torch.device | str,
) -> Tensor | None:
    """Where packed documents begin [B, T]: at tokens that do not see the token before. None for
    one document a row.

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
    if bool(sees.all()):
        return None
    return torch.nn.functional.pad(~sees.expand(B, -1), (1, 0), value=True)


def of_positions(position_ids: Tensor, B: int) -> Tensor | None:
    """The mask of B packed rows, by positions [1|B, T] that return to 0; None if they do not."""
    begins = position_ids[:, 1:] == 0
    if not bool(begins.any()):
        return None
    begins = torch.nn.functional.pad(begins, (1, 0), value=True).expand(B, -1)
    return encoded(B, begins.shape[1], None, begins, begins.device)


def begin_again(position_ids: Tensor, follow: bool) -> bool:
    """Whether positions [1|B, T] return to 0; of tokens that follow others the first too."""
    return bool((position_ids[:, 0 if follow else 1 :] == 0).any())


REASON = "packed sequences are looked for on the host: give attention_mask [B, S]"
documents_uncompiled = torch.compiler.disable(document_begins, reason=REASON)
positions_uncompiled = torch.compiler.disable(of_positions, reason=REASON)


# masks of the user


def is_own(mask: Tensor, S: int) -> bool:
    """Whether a mask for S keys has one of the forms above, as layers get them. A mask of the user
    has S columns; `converted` refuses another width."""
    if mask.ndim != 4 or mask.shape[1] != 1:
        return False
    if mask.dtype == torch.int64:
        return mask.shape[2:] == (1, 1) and len(mask) < 3 and S > 1
    if mask.dtype != torch.int16 or mask.shape[2] > 2:
        return False
    return mask.shape[3] == S + MORE or (len(mask) == 0 and mask.shape[3] < S)


def within_window(mask: Tensor, T: int, S: int, sliding_window: int) -> Tensor:
    """Which of S keys the last T queries of an own mask [B, 1, 1|2, L] see in a window: bool
    [B, 1, T, S]."""
    L = mask.shape[-1]
    key = torch.arange(S, device=mask.device)
    query = torch.arange(L - T, L, device=mask.device)[:, None]
    real = torch.nn.functional.pad(mask[:, :, :1] > 0, (0, S - L))
    visible = real & (key <= query) & (key > query - sliding_window)
    if mask.shape[2] == 2:
        document = torch.nn.functional.pad(mask[:, :, 1].cumsum(-1), (0, S - L))
        visible = visible & (document[:, :, None] == document[:, :, L - T : L, None])
    return visible


def converted(mask: Tensor, B: int, T: int, S: int) -> Tensor | None:
    """The form above of a mask [B, 1, T, S] of the user: bool or integers, True to see, or floats,
    0 to see and a large negative number not to.

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
    return padding_or_documents(visible[:, 0], B, T, S)


def padding_or_documents(visible: Tensor, B: int, T: int, S: int) -> Tensor | None:
    """The form of `visible` [b, T, S]: which keys the queries, the last T written tokens, see."""
    device, begins, written = visible.device, None, [S]
    real = visible.any(1)
    if T == S:
        real = visible.diagonal(dim1=1, dim2=2)
        apart = ~visible[:, 1:, :-1].diagonal(dim1=1, dim2=2) & real[:, 1:] & real[:, :-1]
        if bool(apart.any()):
            begins = torch.nn.functional.pad(apart, (1, 0), value=True)
    else:  # last keys that no query sees are not written yet, in a static cache, or padding
        seen = real.any(0).nonzero()
        last = max(T, int(seen[-1]) + 1 if len(seen) else 0)
        written = [last, S]
    L = next((L for L in written if agrees(visible[..., :L], real[:, :L], begins)), None)
    if L is None:
        raise ValueError(
            f"attention_mask [B, 1, T, S] must be causal, with padding or packed documents: {HINT}"
        )
    real = real[:, :L]
    if begins is None and bool(real.all()):
        return unpadded(T, S, L - T, False, device)
    if begins is not None:
        begins = begins.expand(B, -1)
    return encoded(B, L, real, begins, device)


def agrees(visible: Tensor, real: Tensor, begins: Tensor | None) -> bool:
    """Whether the last T of L tokens see, in `visible` [b, T, L], the `real` ones [b, L] of their
    document up to their own. What padding sees has no effect."""
    T, L = visible.shape[1:]
    key = torch.arange(L, device=visible.device)
    expected = real[:, None] & (key <= key[L - T :, None])
    if begins is not None:
        document = begins.cumsum(1)
        expected = expected & (document[:, None] == document[:, L - T :, None])
    return not bool(((visible != expected) & real[:, L - T :, None]).any())
