"""Two checkouts timed in turns."""

import pytest
import torch

from benchmarks import against, common


@pytest.mark.slow
def test_a_checkout_against_itself(capsys):
    rows = against.main([str(common.ROOT), "--quick", "--seconds", "0.01"])
    assert [row["case"].split(",")[0] for row in rows] == ["forward", "both", "decode"]
    for row in rows:
        assert row["times_other"] == pytest.approx(row["ms"] / row["other_ms"], abs=1e-4)
        assert min(row["ms"], row["other_ms"]) > 0 and row["other_commit"]
    out = capsys.readouterr().out
    assert "| case | this, ms | other, ms | this / other |" in out and "| decode, B=1" in out


def test_commit_of_an_export(tmp_path):
    """Inside of a checkout, whose commit is not its own."""
    export = tmp_path / "e4529bf"
    export.mkdir()
    assert against.commit_of(export) == "e4529bf"
    inside = common.ROOT / "tests"
    assert against.commit_of(inside) == "tests"


def test_a_folder_that_is_none(tmp_path):
    with pytest.raises(SystemExit, match="path must be a checkout of this library, got"):
        against.main([str(tmp_path)])


@pytest.mark.slow
def test_a_tree_that_fails(tmp_path):
    """Also one whose package would not be the one that is timed."""
    package = tmp_path / "native_sparse_attention"
    package.mkdir()
    (package / "__init__.py").write_text("raise ValueError('why')")
    with pytest.raises(RuntimeError, match="failed: ValueError: why"):
        against.times_of(tmp_path, torch.device("cpu"), True, 0.01)
