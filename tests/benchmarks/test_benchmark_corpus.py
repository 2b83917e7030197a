"""The text that models are trained on: the same of a directory and of an archive, nothing leaks."""

import lzma
import tarfile

import pytest

from benchmarks import common, corpus

SIZES = corpus.Sizes(whole=30_000, held_out=9_000, file=2_000)


@pytest.fixture
def tree(tmp_path):
    """Sources in directories of three levels, and what is left out."""
    root = tmp_path / "linux-1"
    for index in range(40):
        folder = root / f"drivers/kind{index % 4}/maker{index // 4}/chip"
        folder.mkdir(parents=True)
        for name in ("b.c", "a.h"):
            (folder / name).write_text(f"/* {name} of {index} */\n" * 20)
        (folder / "sub").mkdir()
        (folder / "sub" / "c.rst").write_text(f"Chip {index}\n")
    folder = root / "drivers/kind0/maker0/chip"
    (folder / "copy.c").write_bytes((folder / "b.c").read_bytes())
    (folder / "binary.c").write_bytes(b"a\0b")
    (folder / "large.h").write_text("x" * 2_001)
    (folder / "program.py").write_text("pass\n")
    (folder / "link.c").symlink_to("b.c")
    return root


def files_in(text):
    return [part.partition(b"\n")[0].decode() for part in text.split(b"\0") if part]


def test_text_of_a_tree(tree, tmp_path):
    out = tmp_path / "text"
    row = corpus.build(tree, out, SIZES)
    content = out.read_bytes()
    assert len(content) == row["bytes"] <= SIZES.whole
    assert corpus.about(out) == {"bytes": row["bytes"], "sha256": row["sha256"]}
    train, held_out = (part.tobytes() for part in corpus.mapped(out))
    assert train + corpus.HELD_OUT + held_out == content
    assert len(train) == row["train_bytes"] and len(held_out) == row["held_out_bytes"]
    groups = [{corpus.group_of(name) for name in files_in(text)} for text in (train, held_out)]
    assert groups[0] and groups[1] and not groups[0] & groups[1]
    assert groups[1] == set(row["held_out_groups"])
    for text in (train, held_out):
        names = files_in(text)
        assert names == sorted(names, key=lambda name: name.rpartition("/")[::2])
        assert not any(
            word in name for name in names for word in ("copy", "binary", "large", ".py")
        )
        assert not any("link" in name for name in names)
    name = files_in(train)[0]
    assert train.startswith(b"\0" + name.encode() + b"\n" + (tree / name).read_bytes() + b"\0")


@pytest.mark.parametrize("kind", ["", "xz"])
def test_an_archive_has_the_text_of_its_directory(tree, tmp_path, kind):
    archive = tmp_path / "linux.tar"
    with tarfile.open(archive, f"w:{kind}") as file:
        for path in sorted(tree.rglob("*"), reverse=True):
            file.add(path, f"./{path.relative_to(tree.parent)}", recursive=False)
    rows = [
        corpus.build(source, tmp_path / f"text{i}", SIZES)
        for i, source in enumerate([tree, archive])
    ]
    for row in rows:
        del row["source"], row["source_sha256"]
    assert rows[0] == rows[1]
    assert (tmp_path / "text0").read_bytes() == (tmp_path / "text1").read_bytes()


def test_what_cannot_be_read(tree, tmp_path):
    whole = tmp_path / "bytes"  # any file has held-out text
    whole.write_bytes(bytes(range(1, 101)))
    assert [len(part) for part in corpus.mapped(whole)] == [95, 5]
    out = tmp_path / "text"
    with pytest.raises(ValueError, match=r"source must be a directory or a tar.*linux-source-6.12"):
        corpus.build(tmp_path / "nothing", out, SIZES)
    broken = tmp_path / "broken.tar.xz"
    broken.write_bytes(lzma.compress(b"x" * 2000)[:-20])
    with pytest.raises(ValueError, match="source must be a directory or a tar"):
        corpus.build(broken, out, SIZES)
    with pytest.raises(ValueError, match="make no training text"):
        corpus.build(tree / "drivers/kind1/maker1", out, SIZES)
    with pytest.raises(ValueError, match="whole must be at least 6, got 5"):
        corpus.Sizes(whole=5, held_out=5)
    with pytest.raises(SystemExit, match="No such file"):
        corpus.main([str(tmp_path / "nothing"), "--text", str(out)])
    assert not out.exists()


def test_command(tree, tmp_path, capsys):
    text, out = tmp_path / "text", tmp_path / "rows.jsonl"
    sizes = ["--bytes", "30000", "--held-out-bytes", "9000", "--file-bytes", "2000"]
    (row,) = corpus.main([str(tree), "--text", str(text), *sizes, "--out", str(out)])
    assert row["sha256"] in capsys.readouterr().out
    assert common.read_rows(out)[0]["sha256"] == row["sha256"]
    assert {path.name for path in tmp_path.iterdir()} == {
        "linux-1", "text", "text.json", "rows.jsonl",
    }  # fmt: skip
