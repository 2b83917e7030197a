"""Fixtures of the tests of train_enwik8.py."""

import pytest

import train_enwik8


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "squares.txt"
    path.write_text("".join(f"{i} squared is {i * i}\n" for i in range(3000)))
    return path


@pytest.fixture
def without_plots(monkeypatch):
    """Which take as long as the training."""
    monkeypatch.setattr(train_enwik8, "draw", lambda *_: None)
