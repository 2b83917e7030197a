"""What each token is in a text: characters that nobody sees, and tokens that are parts of some."""

import pytest

from native_sparse_attention.view import token_texts
from native_sparse_attention.view.texts import byte_texts, visible


class Bytes:
    """A tokenizer of bytes, without offsets."""

    all_special_ids = ()

    def __init__(self, errors):
        self.errors = errors

    def __call__(self, text, verbose):
        return {"input_ids": list(text.encode())}

    def decode(self, ids, **options):
        return bytes(ids).decode(errors=self.errors)


UNSEEN = "\x80\x85\x9b\u061c\u200b\u200e\u200f\u2028\u2029\u202a\u202e\u2060\u2066\u2069\ufeff"


@pytest.mark.parametrize("character", UNSEEN)
def test_what_nobody_sees_has_a_code(character):
    code = f"<U+{ord(character):04X}>"
    assert visible(character) == code
    assert byte_texts(character.encode()) == [code, *"·" * (len(character.encode()) - 1)]


def test_the_others():
    assert "".join(map(visible, "a\n\t\0\x1b\x7fé🐝\u200d\ufffd")) == "a\n\t␀␛␡é🐝\u200d\ufffd"
    assert byte_texts(b"\x7f\xc2\xa0\xff") == ["␡", "<U+00A0>", "·", "\ufffd"]


@pytest.mark.parametrize("errors", ["replace", "ignore"])
@pytest.mark.parametrize(
    "text",
    ["ab", "été 🐝", "🐝🐝é", "a\ufffdb", "\ufffd", "\ufffdé\ufffd🐝\ufffd\ufffd", "é\u202ea"],
)
def test_decoded_pieces_are_the_text(text, errors):
    """Those of a character that was lost in the text, too."""
    ids, pieces = token_texts(Bytes(errors), text)
    assert len(pieces) == len(ids)
    assert "".join(pieces).replace("·", "") == "".join(map(visible, text))


@pytest.mark.parametrize("errors", ["replace", "ignore"])
def test_lost_characters_take_no_longer(errors):
    """The tokens that are decoded at once are few."""
    tokenizer, most = Bytes(errors), 0
    decode = tokenizer.decode

    def counted(ids, **options):
        nonlocal most
        most = max(most, len(ids))
        return decode(ids, **options)

    tokenizer.decode = counted
    _, pieces = token_texts(tokenizer, "\ufffd" * 500)
    assert "".join(pieces).count("\ufffd") == 500 and most <= 12


def test_tokens_without_a_text():
    tokenizer, most = Bytes("ignore"), 0

    def nothing(ids, **options):
        nonlocal most
        most = max(most, len(ids))
        return ""

    tokenizer.decode = nothing
    assert token_texts(tokenizer, "a" * 100)[1] == ["·"] * 100 and most <= 12
