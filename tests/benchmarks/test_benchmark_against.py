"""Two checkouts timed in turns."""

import pytest
import torch

from benchmarks import against, common


@pytest.mark.slow
def test_a_checkout_against_itself(capsys):
    groups = ["operators", "decoding", "first_call"]
    options = ["--quick", "--device", "cpu", "--seconds", "0.01", "--rounds", "1"]
    rows = against.main([str(common.ROOT), *options, "--groups", *groups])
    names = [row["case"].partition(", ")[0] for row in rows]
    assert names == ["operator"] * 2 + ["decode"] * 4 + ["first call", "call after it"]
    for row in rows:
        assert row["times_other"] == pytest.approx(row["ms"] / row["other_ms"], abs=1e-3)
        assert min(row["ms"], row["other_ms"]) > 0 and row["other_commit"]
    out = capsys.readouterr().out
    assert "| case | this, ms | other, ms | this / other |" in out
    assert "| decode, layer, one-softmax, S=256 |" in out


def test_table():
    known = {"gpu": "GPU", "commit": "a", "other_commit": "b"}
    rows = [
        {"case": "slower", "ms": 2.0, "other_ms": 1.0, "times_other": 2.0, **known},
        {"case": "as fast", "ms": 1.02, "other_ms": 1.0, "times_other": 1.02, **known},
        {"case": "gone", "failed": "why", "other_ms": 1.0, **known},
    ]
    assert against.table(rows).splitlines()[2:] == [
        "| slower | 2 | 1 | **2.000** |",
        "| as fast | 1.02 | 1 | 1.020 |",
        "| gone | failed | 1 |  |",
        "",
        "GPU; this a, other b.",
        "* gone, this: why",
    ]
    assert against.table([]) == common.NO_ROWS


def test_a_folder_that_is_none(tmp_path):
    with pytest.raises(SystemExit, match="path must be a checkout of this library, got"):
        against.main([str(tmp_path)])


@pytest.mark.slow
def test_a_tree_that_fails(tmp_path):
    package = tmp_path / "native_sparse_attention"
    package.mkdir()
    (package / "__init__.py").write_text("raise ValueError('why')")
    rows = against.times_of(tmp_path, "host", torch.device("cpu"), 0.01, True)
    assert rows == {"all of host": {"failed": "ValueError: why"}}
