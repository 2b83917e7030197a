"""The benchmark of compressed keys and values: runs, refuses what is wrong, draws its page."""

import json

import pytest
import torch

from benchmarks import common, windows
from benchmarks.oracle import WrongResult
from tests.helpers.budget import DEVICE


@pytest.mark.slow
def test_quick_form(tmp_path):
    path = tmp_path / "rows.jsonl"
    rows = windows.main(["--quick", "--seconds", "0", "--device", DEVICE, "--out", str(path)])
    assert common.read_rows(path) == [json.loads(json.dumps(row)) for row in rows]
    assert [(row["network"], row["way"]) for row in rows] == [
        (name, way)
        for name in windows.NETWORKS
        for way in ("copied", *(["sliding"] if "MLP" not in name else []))
    ]
    assert all(row["forward_ms"] > 0 and row["backward_ms"] > 0 for row in rows)


def test_wrong_summaries_are_not_timed(monkeypatch):
    layer = windows.layer_of("MeanPool", 2, 16, 8, 4).to(torch.bfloat16)
    kv = windows.draw(1, 2, 64, 16, torch.device("cpu"))
    windows.check(layer, kv, "sliding")
    right = layer.compress_whole

    def a_stride_late(raw, documents, backend):
        return {name: t.roll(1, dims=2) for name, t in right(raw, documents, backend).items()}

    monkeypatch.setattr(layer, "compress_whole", a_stride_late)
    with pytest.raises(WrongResult, match="sliding windows err by"):
        windows.check(layer, kv, "sliding")


def test_table():
    row = {"network": "MeanPool", "way": "copied", "b": 1, "n": 8192, "d": 128, "l": 32}
    row |= {"forward_ms": 0.25, "backward_ms": 0.5, "kept": 0.06, "peak": 3.1}
    row |= {"gpu": "GPU", "torch": "2.11", "commit": "abcdef0123"}
    sliding = row | {"way": "sliding", "forward_ms": 0.125, "peak": 1.06}
    longer = row | {"n": 32768}
    assert windows.table([row, sliding, longer]).splitlines() == [
        "| ms, forward / backward; kept, peak | b=1, n=8k, d=128, l=32 | b=1, n=32k, d=128, l=32 |",
        "| --- | --- | --- |",
        "| MeanPool, copied | 0.250 / 0.500; 0.1, 3.1 | 0.250 / 0.500; 0.1, 3.1 |",
        "| MeanPool, sliding | 0.125 / 0.500; 0.1, 1.1 |  |",
        "",
        "GPU, torch 2.11, commit abcdef0.",
    ]
    assert windows.table([]) == windows.NO_ROWS
    page = "a\n<!-- begin: windows -->\nold\n<!-- end: windows -->\nb"
    assert windows.render(page, [row]) == windows.render(windows.render(page, []), [row])


def test_page_is_drawn_from_the_rows():
    page = windows.PAGE.read_text(encoding="utf-8")
    assert windows.render(page, common.read_rows(common.RESULTS / "windows.jsonl")) == page
