"""The benchmark of the rotary embedding: it runs, refuses what is wrong, and its page is drawn from
the rows."""

import json

import pytest
import torch

from benchmarks import common, rotary
from benchmarks.oracle import WrongResult
from tests.helpers.budget import DEVICE


def test_quick_form(tmp_path):
    path = tmp_path / "rows.jsonl"
    rows = rotary.main(["--quick", "--seconds", "0", "--device", DEVICE, "--out", str(path)])
    assert common.read_rows(path) == [json.loads(json.dumps(row)) for row in rows]
    assert [(row["provider"], row["pass"]) for row in rows] == [
        (name, which)
        for name in (rotary.PEER, "ours", *(["compiled"] if DEVICE == "cuda" else []))
        for which in ("forward", "backward")
    ]
    assert all(0 < row["error_share"] <= 1 and row["p50_ms"] > 0 for row in rows)
    assert all(row["over_published"] == 1 for row in rows[:2])


def test_wrong_angles_are_not_timed():
    """Those of positions in bf16, which the published module forms by itself."""
    pair, d_out = rotary.draw(1, 600, torch.device("cpu"))
    module = rotary.RotaryEmbedding(rotary.D, cache_if_possible=False)
    with pytest.raises(WrongResult, match="errs by"):
        rotary.check(lambda p: [module.rotate_queries_or_keys(t) for t in p], pair, d_out)


def test_table():
    row = {"provider": rotary.PEER, "B": 1, "T": 8192, "pass": "forward", "p50_ms": 1.5}
    row |= {"over_published": 1.0, "gbps": 100.2, "gpu": "GPU", "torch": "2.11", "triton": "3.6"}
    row |= {"commit": "abcdef0123"}
    ours = row | {"provider": "ours", "p50_ms": 0.25, "over_published": 6.0, "gbps": 601.2}
    assert rotary.table([row, ours, row | {"B": 16, "T": 1}]).splitlines() == [
        "| ms (times as fast); GB/s | B=1, T=8k, forward | B=16, T=1, forward |",
        "| --- | --- | --- |",
        "| rotary-embedding-torch | 1.5; 100 | 1.5; 100 |",
        "| ours | 0.25 (6); 601 |  |",
        "",
        "GPU, torch 2.11, triton 3.6, commit abcdef0.",
    ]
    assert rotary.table([]) == rotary.NO_ROWS


def test_page_is_drawn_from_the_rows():
    page = rotary.PAGE.read_text(encoding="utf-8")
    assert rotary.render(page, common.read_rows(common.RESULTS / "rotary.jsonl")) == page
