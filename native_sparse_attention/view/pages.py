"""`page`: one HTML file in which a reader points at a token and sees what it reads.

The file holds its data as JSON, with arrays in base64, little-endian, in the order of their axes:

    m  recorded tokens    r  heads that rank    h  query heads    x  slots of a token

    blocks  uint16 [m r x], EMPTY for an empty slot
    dense   uint8 [m], 1 for a token that attends to all keys
    gates, agreement
            uint8 [m h branches], [m r]: shares of 1 in steps of 1/255
    mass, caught, window_mass
            uint8 [m h x], [m h], [m h]: square roots of shares, which tell small ones apart
"""

from __future__ import annotations

import base64
import html
import json
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from importlib import resources
from typing import Any

import torch
from torch import Tensor, nn

from ..checks import INTEGER_DTYPES, check_callable, check_type, refusal
from ..generate import evaluating
from .collector import Reading, collect

# an empty slot, and so no number of a block
EMPTY = 2**16 - 1
# a token that ends no character, or stands for nothing that a reader sees
NOTHING = "·"
# more tokens than one character has
WINDOW = 8


def encode(t: Tensor) -> str:
    return base64.b64encode(t.contiguous().numpy().tobytes()).decode("ascii")


def encode_shares(t: Tensor | None, power: float = 1.0) -> str | None:
    """Shares of 1, or a power of them, in steps of 1/255; NaN becomes 0."""
    if t is None:
        return None
    return encode(((t[0] ** power).nan_to_num().clamp(0, 1) * 255).round().to(torch.uint8))


def layer_data(reading: Reading) -> dict[str, Any]:
    """What the page needs of a layer, for the first sequence of a batch."""
    config, blocks = reading.config, reading.blocks
    if reading.length >= EMPTY * config.selection_block_size:
        raise ValueError(f"tokens must lie in fewer than {EMPTY} blocks, got {reading.length}")
    if blocks is not None:
        blocks = torch.where(blocks < 0, EMPTY, blocks)[0].to(torch.int32).to(torch.uint16)
    return {
        "name": reading.layer or "layer",
        "heads": config.heads,
        "ranks": 0 if blocks is None else blocks.shape[1],
        "block": config.selection_block_size,
        "window": config.sliding_window_size if "window" in config.branches else None,
        "causal": config.causal,
        "branches": list(config.branches),
        "kinds": list(reading.kinds),
        "dense": encode(reading.dense[0].to(torch.uint8)),
        "blocks": None if blocks is None else encode(blocks),
        "mass": encode_shares(reading.block_mass, 0.5),
        "caught": encode_shares(reading.mass, 0.5),
        "window_mass": encode_shares(reading.window_mass, 0.5),
        "gates": encode_shares(reading.gates),
        "agreement": encode_shares(None if reading.scores is None else reading.agreement),
    }


def page(
    model: nn.Module,
    tokens: Tensor | Sequence[int],
    texts: Sequence[str],
    *,
    layers: Sequence[str | int] | None = None,
    queries: int | Tensor | None = None,
    seed: int = 0,
    title: str = "What the layers read",
    model_kwargs: Mapping[str, Any] | None = None,
) -> str:
    """An HTML page, without references to other files, of what each token of a text reads.

    Runs `model(tokens[None], **model_kwargs)` once, in eval mode and without gradients, under
    `collect`.

    Args:
        model: a module with `SparseAttention` layers that takes ids [1, n].
        tokens: ids [n]. texts: what each token is in the text, n strings.
        layers, queries, seed: as in `collect`; all tokens by default. The size of the page is that
            of the chosen blocks of these tokens, in these layers.
        title: heading of the page.
        model_kwargs: other arguments of the model; `dict(use_cache=False)` for one of transformers.
    """
    try:
        ids = torch.as_tensor(tokens)
    except (TypeError, ValueError, RuntimeError):
        ids = torch.empty(0)
    if ids.is_meta or ids.ndim != 1 or ids.dtype not in INTEGER_DTYPES or not len(ids):
        raise refusal("tokens", "ids [n] of one text", tokens)
    check_type("texts", texts, Iterable, f"{len(ids)} strings, one a token")
    check_type("title", title, str, "a string")
    kwargs = {} if model_kwargs is None else model_kwargs
    check_type("model_kwargs", kwargs, Mapping, "a dict or None")
    texts = list(texts)
    if len(texts) != len(ids) or not all(isinstance(text, str) for text in texts):
        raise refusal("texts", f"{len(ids)} strings, one a token", texts)
    with (
        collect(model, queries, layers=layers, seed=seed) as collection,
        evaluating(model),
        torch.no_grad(),
    ):
        device = next((weight.device for weight in model.parameters()), None)
        model(ids[None].to(device), **kwargs)
    readings = collection.forward()
    for reading in readings:
        if reading.length != len(ids) or reading.documents is not None:
            expected = f"run {reading.layer!r} over the {len(ids)} tokens of one text"
            raise ValueError(f"model must {expected}, got {reading.length}")
    data = {
        "texts": texts,
        "empty": EMPTY,
        "positions": readings[0].positions[0].tolist(),
        "layers": [layer_data(reading) for reading in readings],
    }
    # no "</script>" inside of the script
    content = json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    template = resources.files(__package__).joinpath("page.html").read_text(encoding="utf-8")
    heading = html.escape(title).encode(errors="replace").decode()
    head, _, tail = template.partition("{{data}}")
    return head.replace("{{title}}", heading) + content + tail


def visible(character: str) -> str:
    """The picture of a control character of ASCII, other than newline and tab; the code of another
    that a reader does not see, such as <U+202E>; else the character."""
    code = ord(character)
    is_seen = character.isprintable() or unicodedata.category(character) == "Zs"
    if is_seen or character in "\n\t\u200c\u200d":
        return character
    if code < 32 or code == 127:
        return "\u2421" if code == 127 else chr(0x2400 + code)
    return f"<U+{code:04X}>"


def byte_texts(data: bytes) -> list[str]:
    """A text for each byte of UTF-8: its character at the first byte of a character, "·" at the
    others, and pictures or codes of characters that a reader does not see."""
    check_type("data", data, (bytes, bytearray), "bytes")
    texts = []
    for character in data.decode("utf-8", errors="surrogateescape"):
        if "\udc80" <= character <= "\udcff":  # a byte of no character
            texts.append("\ufffd")
        else:
            texts += [visible(character), *[NOTHING] * (len(character.encode()) - 1)]
    return texts


def token_texts(tokenizer: Any, text: str) -> tuple[list[int], list[str]]:
    """The tokens of a text by a tokenizer of transformers, and what each adds to the decoded text:
    n ids and n strings, as `page` takes them.

    Of tokens that share a character the last has it, and the others have "·". Control characters,
    and others that a reader does not see, are pictures or codes such as <U+202E>.
    """
    check_type("text", text, str, "a string")
    check_callable("tokenizer", tokenizer, "a text, of transformers", required=True)
    ids, pieces = list(tokenizer(text, verbose=False)["input_ids"]), []
    for i in range(len(ids)):
        prefix, longer = (
            tokenizer.decode(ids[max(0, i - WINDOW) : end], clean_up_tokenization_spaces=False)
            for end in (i, i + 1)
        )
        # without a character of which tokens are missing
        piece = longer.rstrip("\ufffd")[len(prefix.rstrip("\ufffd")) :]
        pieces.append("".join(map(visible, piece)) or NOTHING)
    return ids, pieces
