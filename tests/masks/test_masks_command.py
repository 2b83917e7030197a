"""`python -m native_sparse_attention.masks`."""

import re
import sys

import pytest

from native_sparse_attention.masks import __main__ as command


def test_command(tmp_path, capsys):
    out = tmp_path / "natten.png"
    options = ["natten", "--length", "12", "--canvas-width", "4", "--kernel-height", "3"]
    options += ["--kernel-width", "1", "--block-size", "5", "--out", str(out)]
    command.main(options)
    picture = "\n".join(["#...#...#...", ".#...#...#..", "..#...#...#.", "...#...#...#"] * 3)
    assert capsys.readouterr().out == (
        "natten: 12 queries, 12 keys, 25.0 % of the pairs allowed\n\n"
        f"a cell is one pair (. none  + some  # all)\n{picture}\n\n"
        "a cell is a tile of 5 x 5 (. none  + some  # all)\n+++\n+++\n+++\n\n"
        "9 tiles: 0 empty, 9 partial, 0 full; 0.0 % skipped\n"
    )
    assert out.read_bytes().startswith(b"\x89PNG")


def test_command_counts_what_is_skipped(capsys):
    command.main(["causal", "--length", "100", "--block-size", "25"])
    text = capsys.readouterr().out
    assert text.endswith("16 tiles: 6 empty, 4 partial, 6 full; 37.5 % skipped\n")
    assert "+...\n#+..\n##+.\n###+\n" in text
    # the last tile hangs over the end, so that its mask is always asked for
    command.main(["prefix_lm", "--length", "99", "--prefix-length", "99", "--block-size", "33"])
    assert "9 tiles: 0 empty, 0 partial, 9 full" in capsys.readouterr().out
    command.main(["prefix_lm", "--length", "99", "--prefix-length", "99", "--block-size", "50"])
    assert "4 tiles: 0 empty, 3 partial, 1 full" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["nothing"], "invalid choice: 'nothing' .*causal.*natten.*selected"),
        (["natten", "--kernel-height", "4"], "kernel_height must be odd, .* got 4"),
        (["causal", "--length", "0"], "length must be an integer of at least 1, got 0"),
        (["causal", "--out", "causal.jpg"], "--out must be a .png file .*, got causal.jpg"),
        (["causal", "--out", "nowhere/causal.png"], "a folder there is, got nowhere.causal.png"),
    ],
)
def test_command_refuses(options, told, capsys):
    with pytest.raises(SystemExit) as stop:
        command.main(options)
    assert stop.value.code == 2
    assert re.search(told, capsys.readouterr().err, re.DOTALL)


def test_command_without_matplotlib(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(SystemExit):
        command.main(["causal", "--length", "8", "--out", str(tmp_path / "causal.png")])
    assert "pip install -e '.[plot]'" in capsys.readouterr().err
