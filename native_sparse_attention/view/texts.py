"""What each token is in a text: of bytes, and of a tokenizer of transformers."""

from __future__ import annotations

import re
from typing import Any

from ..checks.scalars import shown

# a token that ends no character, or stands for nothing that a reader sees
NOTHING = "·"
# a character has at most so many bytes, and so many tokens
LONGEST = 4

# other control characters, and characters that change the order of others, break lines, or have no
# width and join nothing
UNSEEN = re.compile("[\x80-\x9f\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u2069\ufeff]")


def code_of(character: str) -> str:
    return f"<U+{ord(character):04X}>"


def visible(character: str) -> str:
    """The picture of a control character of ASCII, other than newline and tab; the code of another
    that a reader does not see, such as <U+202E>; else the character."""
    code = ord(character)
    if code < 32 and character not in "\n\t":
        return chr(0x2400 + code)
    if code == 127:
        return "\u2421"
    return code_of(character) if UNSEEN.match(character) else character


def byte_texts(data: bytes) -> list[str]:
    """A text for each byte of UTF-8: its character at the first byte of a character, "·" at the
    others, and pictures or codes of characters that a reader does not see."""
    texts = []
    for character in data.decode("utf-8", errors="surrogateescape"):
        code = ord(character)
        size = 1 if 0xDC80 <= code <= 0xDCFF else len(character.encode())
        if 0xDC80 <= code <= 0xDCFF:  # a byte of no character
            character = "\ufffd"
        else:
            character = visible(character)
            if len(character) == 1 and not character.isprintable() and character not in "\n\t":
                character = code_of(character)
        texts += [character, *[NOTHING] * (size - 1)]
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
    codes such as <U+202E>. A tokenizer without offsets, which is not "fast", gives what it decodes
    instead.

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
    special, pieces, first, before = set(tokenizer.all_special_ids), [], 0, ""
    options = dict(skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def text_of(last: int) -> str:
        return tokenizer.decode(ids[first:last], **options)

    for i, token in enumerate(ids):
        if token in special:
            pieces.append(str(tokenizer.convert_ids_to_tokens(token)))
            first, before = i + 1, ""
            continue
        now, late = text_of(i + 1), i - first >= 2 * LONGEST
        whole = len(now) > len(before)
        if whole and now.endswith("\ufffd") and not late:
            # a part of a character, which the next tokens replace, or a character of the text
            ends = range(i + 2, min(i + 1 + LONGEST, len(ids) + 1))
            whole = all(text_of(end).startswith(now) for end in ends)
        pieces.append("".join(map(visible, now[len(before) :])) if whole else NOTHING)
        if whole or late:
            first = i
            before = text_of(i + 1)
    return pieces
