"""What each token is in a text: of bytes, and of a tokenizer of transformers."""

from __future__ import annotations

import unicodedata
from typing import Any

from ..checks import describe

# a token that ends no character, or stands for nothing that a reader sees
NOTHING = "·"
# more tokens than one character has
WINDOW = 8


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
    texts = []
    for character in data.decode("utf-8", errors="surrogateescape"):
        if "\udc80" <= character <= "\udcff":  # a byte of no character
            texts.append("\ufffd")
        else:
            texts += [visible(character), *[NOTHING] * (len(character.encode()) - 1)]
    return texts


def first_document(data: bytes, marker: bytes) -> bytes:
    """The bytes from the first marker up to the next one; all of them where there is none."""
    start = max(0, data.find(marker))
    end = data.find(marker, start + 1)
    return data[start:] if end < 0 else data[start:end]


def token_texts(tokenizer: Any, text: str) -> tuple[list[int], list[str]]:
    """The tokens of a text, and what each of them is in it.

    Together the pieces are the text up to the end of the last token. Characters that no token
    stands for belong to the next one. Of tokens that share a character the first has it, and the
    others have "·". Control characters, and others that a reader does not see, are pictures or
    codes such as <U+202E>. A tokenizer without offsets, which is not "fast", gives what each token
    adds to the decoded text; then the last token of a character has it.

    Args:
        tokenizer: a tokenizer of transformers.
        text: without the special tokens that the tokenizer adds; these have their name.

    Returns:
        n ids and n strings, as `page` takes them.

    Raises:
        ValueError: no tokenizer, or a text that is no string.
    """
    if not callable(tokenizer):
        raise ValueError(f"tokenizer must be one of transformers, got {describe(tokenizer)}")
    if not isinstance(text, str):
        raise ValueError(f"text must be a string, got {describe(text)}")
    if not getattr(tokenizer, "is_fast", False):
        ids = list(tokenizer(text, verbose=False)["input_ids"])
        return ids, decoded_texts(tokenizer, ids)
    encoding = tokenizer(
        text, return_offsets_mapping=True, return_special_tokens_mask=True, verbose=False
    )
    ids, pieces, end = list(encoding["input_ids"]), [], 0
    names = tokenizer.convert_ids_to_tokens(ids)
    marks, offsets = encoding["special_tokens_mask"], encoding["offset_mapping"]
    for name, is_special, (_, last) in zip(names, marks, offsets, strict=True):
        if is_special:
            pieces.append(str(name))
            continue
        pieces.append("".join(map(visible, text[end:last])) or NOTHING)
        end = max(end, last)
    return ids, pieces


def decoded_texts(tokenizer: Any, ids: list[int]) -> list[str]:
    """What each token adds to the text that is decoded with the tokens before it."""

    def decode(start: int, end: int) -> str:
        text = tokenizer.decode(
            ids[start:end], skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        return text.rstrip("\ufffd")  # a character of which tokens are missing

    pieces = []
    for i in range(len(ids)):
        start = max(0, i - WINDOW)
        added = decode(start, i + 1)[len(decode(start, i)) :]
        pieces.append("".join(map(visible, added)) or NOTHING)
    return pieces
