"""What each token is in a text: of bytes, and of a tokenizer of transformers."""

from __future__ import annotations

from typing import Any

from ..checks.scalars import shown

# a token that ends no character, or stands for nothing that a reader sees
NOTHING = "·"


def visible(character: str) -> str:
    """The picture of a control character, other than newline and tab; else the character."""
    is_control = ord(character) < 32 and character not in "\n\t"
    return chr(0x2400 + ord(character)) if is_control else character


def byte_texts(data: bytes) -> list[str]:
    """A text for each byte of UTF-8: its character at the first byte of a character, "·" at the
    others, and pictures of control characters."""
    texts = []
    for character in data.decode("utf-8", errors="surrogateescape"):
        code = ord(character)
        size = 1 if 0xDC80 <= code <= 0xDCFF else len(character.encode())
        if 0xDC80 <= code <= 0xDCFF:  # a byte of no character
            character = "\ufffd"
        else:
            character = visible(character)
            if not character.isprintable() and character not in "\n\t":
                character = "\ufffd"
        texts += [character, *[NOTHING] * (size - 1)]
    return texts


def token_texts(tokenizer: Any, text: str) -> tuple[list[int], list[str]]:
    """The tokens of a text, and what each of them is in it.

    Together the pieces are the text up to the end of the last token. Characters that no token
    stands for belong to the next one. Of tokens that share a character the first has it, and the
    others have "·". Control characters are pictures. A tokenizer without offsets, which is not
    "fast", gives what it decodes instead.

    Args:
        tokenizer: a tokenizer of transformers.
        text: without the special tokens that the tokenizer adds; these have their name.

    Returns:
        n ids and n strings, as `page` takes them.

    Raises:
        ValueError: no tokenizer, or a text that is no string.
    """
    if not callable(tokenizer):
        raise ValueError(f"tokenizer must be one of transformers, got {shown(tokenizer)}")
    if not isinstance(text, str):
        raise ValueError(f"text must be a string, got {shown(text)}")
    if not getattr(tokenizer, "is_fast", False):
        ids = list(tokenizer(text, verbose=False)["input_ids"])
        return ids, decoded(tokenizer, ids)
    found = tokenizer(
        text, return_offsets_mapping=True, return_special_tokens_mask=True, verbose=False
    )
    ids, pieces, end = list(found["input_ids"]), [], 0
    names = tokenizer.convert_ids_to_tokens(ids)
    marks, offsets = found["special_tokens_mask"], found["offset_mapping"]
    for name, special, (_, last) in zip(names, marks, offsets, strict=True):
        if special:
            pieces.append(str(name))
            continue
        pieces.append("".join(map(visible, text[end:last])) or NOTHING)
        end = max(end, last)
    return ids, pieces


def decoded(tokenizer: Any, ids: list[int]) -> list[str]:
    """What each token adds to the text that is decoded with the token before it."""
    special, pieces, first = set(tokenizer.all_special_ids), [], 0
    options = dict(skip_special_tokens=False, clean_up_tokenization_spaces=False)
    for i, token in enumerate(ids):
        if token in special:
            pieces.append(str(tokenizer.convert_ids_to_tokens(token)))
            first = i + 1
            continue
        before = tokenizer.decode(ids[first:i], **options) if first < i else ""
        now = tokenizer.decode(ids[first : i + 1], **options)
        # a part of a character waits for the rest
        whole = len(now) > len(before) and not now.endswith("\ufffd")
        pieces.append("".join(map(visible, now[len(before) :])) if whole else NOTHING)
        first = i if whole else first
    return pieces
