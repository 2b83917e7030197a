"""The benchmark of memory on a CPU: it runs, and its page is drawn from the rows."""

import json

import pytest

from benchmarks import common, memory


@pytest.mark.slow
def test_quick_form(tmp_path):
    path = tmp_path / "rows.jsonl"
    small = ["--lengths", "256", "--importances", "probs", "--device", "cpu", "--out", str(path)]
    (row,) = memory.main(small)
    assert common.read_rows(path) == [json.loads(json.dumps(row))]
    assert row["T"] == 256 and row["importance"] == "probs" and row["gpu"].startswith("none")
    assert row["mib"] >= 0 and row["seconds"] > 0


def test_table():
    row = {
        "gpu": "none (x86_64)",
        "importance": "logits",
        "T": 4096,
        "mib": 79.3,
        "seconds": 0.2921,
    }
    row |= {"seconds": 0.2921, "torch": "2.13", "commit": "abcdef0123"}
    rows = [row, row | {"T": 8192, "mib": 166.4}, row | {"mib": 80.0}]
    rows.append(row | {"gpu": "GPU", "torch": "2.11"})
    assert memory.table(rows).splitlines() == [
        "| MiB; seconds | 4k | 8k |",
        "| --- | --- | --- |",
        "| `logits`; CPU, torch 2.13, commit abcdef0 | 80; 0.292 | 166; 0.292 |",
        "| `logits`; GPU, torch 2.11, commit abcdef0 | 79; 0.292 |  |",
    ]


def test_committed_rows_are_linear():
    """Sixteen times the tokens, less than sixteen times the memory."""
    rows = common.read_rows(memory.RESULTS)
    for gpu, importance in {(row["gpu"], row["importance"]) for row in rows}:
        mib = {
            row["T"]: row["mib"]
            for row in rows
            if row["gpu"] == gpu and row["importance"] == importance
        }
        assert mib[65536] < 16 * mib[4096] and mib[131072] < 8 * mib[16384]
