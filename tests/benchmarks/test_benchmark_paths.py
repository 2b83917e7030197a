"""The benchmark of what paths are worth: it runs, tells what failed, and draws its table."""

import json

import pytest

pytest.importorskip("triton")

from benchmarks import common, paths
from native_sparse_attention.kernels.common import launch

pytestmark = pytest.mark.usefixtures("nothing_to_release")


@pytest.mark.slow
def test_quick_form(tmp_path, capsys, monkeypatch):
    """On a CPU the layer is that of eager PyTorch; every path is left out once, between two."""
    given, using = [], launch.using
    monkeypatch.setattr(launch, "using", lambda tiles: given.append(tiles) or using(tiles))
    out = tmp_path / "rows.jsonl"
    rows = paths.main(["--quick", "--device", "cpu", "--out", str(out)])
    assert common.read_rows(out) == json.loads(json.dumps(rows))
    cases = [(name, which) for name in paths.WITHOUT for which in ("forward", "backward")]
    assert [(row["path"], row["pass"]) for row in rows] == cases
    assert given[1::3] == list(paths.WITHOUT.values()) and len(given) == 3 * len(paths.WITHOUT)
    for row in rows:
        assert row["gain"] == round(row["without_ms"] / row["with_ms"], 4) > 0
    assert "| unions, forward |" in capsys.readouterr().out


def test_what_failed_is_told(monkeypatch):
    def fail(*args):
        raise ValueError("no such thing")

    monkeypatch.setattr(paths.Ours, "call", fail)
    (row,) = paths.main(["--quick", "--device", "cpu", "--paths", "unions"])
    assert "no such thing" in row["failed"]


def test_table():
    """The latest rows; what is worth 5 % is bold."""
    row = {"path": "unions", "T": 8192, "H": 64, "K": 4, "selection_stride": 1}
    rows = [
        {**row, "pass": "forward", "gain": 1.5},
        {**row, "pass": "forward", "gain": 1.02},
        {**row, "pass": "backward", "gain": 1.05},
        {**row, "T": 4096, "selection_stride": 4, "failed": "why"},
    ]
    drawn = paths.table(rows).splitlines()
    assert drawn[0] == "| time without / with | 64/4, 8k | 64/4, 4k, 4 |"
    assert drawn[2:] == [
        "| unions, forward | 1.02 | failed |",
        "| unions, backward | **1.05** | failed |",
    ]
    assert paths.table([]) == paths.NO_ROWS
