"""What each token is in a text: characters that nobody sees, and tokens that are parts of some."""

import pytest

from native_sparse_attention.view import byte_texts, token_texts
from native_sparse_attention.view.pages import visible


class Bytes:
    """A tokenizer of bytes, without offsets."""

    def __init__(self, errors):
        self.errors, self.most = errors, 0

    def __call__(self, text, verbose):
        return {"input_ids": list(text.encode())}

    def decode(self, ids, **options):
        self.most = max(self.most, len(ids))
        return bytes(ids).decode(errors=self.errors)


UNSEEN = "\x80\x85\x9b\u061c\u200b\u200e\u200f\u2028\u2029\u202a\u202e\u2060\u2066\u2069\ufeff"


def test_visible_characters():
    text = "a\n\t\0\x1b\x7fé🐝\u200d\ufffd\xa0\u3000"
    assert "".join(map(visible, text)) == "a\n\t␀␛␡é🐝\u200d\ufffd\xa0\u3000"
    assert [visible(character) for character in UNSEEN] == [f"<U+{ord(c):04X}>" for c in UNSEEN]


@pytest.mark.parametrize(
    ("data", "texts"),
    [
        ("aé\n\t漢".encode(), ["a", "é", "·", "\n", "\t", "漢", "·", "·"]),
        (b"\x00\x1b\x7f\xff\xe6", ["␀", "␛", "␡", "\ufffd", "\ufffd"]),
        ("\u202e".encode(), ["<U+202E>", "·", "·"]),
        (b"", []),
    ],
)
def test_texts_of_bytes(data, texts):
    assert byte_texts(data) == texts
    assert len(byte_texts(bytes(range(256)))) == 256


@pytest.mark.parametrize("errors", ["replace", "ignore"])
@pytest.mark.parametrize("text", ["ab", "été 🐝", "🐝🐝é", "a\ufffdb", "é\u202ea", "é🐝" * 50])
def test_decoded_pieces_are_the_text(text, errors):
    """A few tokens are decoded at once."""
    tokenizer = Bytes(errors)
    ids, pieces = token_texts(tokenizer, text)
    assert len(pieces) == len(ids) and tokenizer.most <= 9
    assert "".join(pieces).replace("·", "") == "".join(map(visible, text))
    with pytest.raises(ValueError, match="text must be a string, got"):
        token_texts(text, tokenizer)
