"""The mistakes of docs/troubleshooting.md give the messages that the page shows."""

import re
from pathlib import Path

import pytest

PAGE = Path(__file__).resolve().parent.parent / "docs" / "troubleshooting.md"
TEXT = PAGE.read_text(encoding="utf-8")
BEGIN = re.search(r"^```python\n(.*?)^```$", TEXT, re.DOTALL | re.MULTILINE)[1]
MISTAKES = re.findall(
    r"^### ([^\n]+)\n\n```py\n(.*?)^```\n\n```text\n(.*?)^```$", TEXT, re.DOTALL | re.MULTILINE
)


def test_every_mistake_has_a_message():
    assert len(MISTAKES) == TEXT.count("\n```py\n") == TEXT.count("\n```text\n") >= 15


@pytest.mark.parametrize(
    "code, message", [pytest.param(*rest, id=title) for title, *rest in MISTAKES]
)
def test_gives_the_message(code, message, monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)  # by which kernels run on a CPU
    scope: dict[str, object] = {}
    exec(compile(BEGIN, str(PAGE), "exec"), scope)
    with pytest.raises((ValueError, NotImplementedError)) as raised:
        exec(compile(code, str(PAGE), "exec"), scope)
    found = f"{type(raised.value).__name__}: {raised.value}"
    assert found.split() == message.split()  # the page wraps lines
