"""benchmarks.distributed in two processes over gloo; its intervals and its table."""

import os
import subprocess
import sys

import pytest
import torch

from benchmarks import common

if not torch.distributed.is_available():
    pytest.skip("this torch has no torch.distributed", allow_module_level=True)

from benchmarks import distributed


def test_quick_form(tmp_path):
    out = tmp_path / "rows.jsonl"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command += ["-m", "benchmarks.distributed", "--quick", "--device", "cpu", "--out", str(out)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    pipes = dict(capture_output=True, text=True, timeout=240)
    done = subprocess.run(command, cwd=common.ROOT, env=environment, **pipes)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    rows = common.read_rows(out)
    assert [(row["subject"], row["mode"]) for row in rows] == [
        *[("model", mode) for mode in distributed.MODES],
        *[("layer", mode) for mode in ("one", "cp")] * 2,
    ]
    assert not any("failed" in row for row in rows)
    assert all(row["error_share"] < 1 for row in rows if row["subject"] == "layer")
    assert all(row["tokens_per_s"] > 0 for row in rows if row["subject"] == "model")


def test_exposed_intervals():
    """What of 0 to 10 and 20 to 30 lies outside of 2 to 4, 3 to 5, 9 to 22 and 26."""
    others = distributed.union([(9, 22), (2, 4), (3, 5), (26, 26)])
    assert others == [(2, 5), (9, 22), (26, 26)]
    spans = distributed.union([(20, 30), (0, 10)])
    found = distributed.subtract(spans, others)
    assert sum(end - begin for begin, end in found) == 2 + 4 + 8
    assert distributed.subtract(spans, []) == spans and distributed.subtract([], spans) == []


def test_table():
    place = dict(subject="model", form="one softmax", T=65536, processes=2)
    alone = dict(place, mode="one", step_ms=2000.0, tokens_per_s=32768, peak_mib=51200)
    both = dict(
        place, mode="cp", step_ms=1100.0, tokens_per_s=59578, peak_mib=30720, exposed_ms=12.3
    )
    text = distributed.table_of([alone, both], "model")
    assert "2.00 s, 50 GiB" in text and "1.10 s, 30 GiB, 91%, 12 ms" in text
    layer = dict(place, subject="layer", mode="cp", forward_ms=900.0, both_ms=2800.0)
    assert "900 / 1900" in distributed.table_of([layer], "layer")


def test_page_has_its_tables():
    page, rows = (
        distributed.PAGE.read_text("utf-8"),
        common.read_rows(distributed.BENCHMARK.results),
    )
    for name in distributed.TABLES[distributed.PAGE]:
        assert f"<!-- begin: {name} -->" in page
    assert common.render(page, distributed.TABLES[distributed.PAGE], rows) == page
