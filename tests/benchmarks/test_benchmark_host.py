"""The benchmark of host time on a CPU: it runs, refuses what is wrong, and prints its table."""

import json

import pytest
import torch

from benchmarks import common, host, host_report
from benchmarks.oracle import WrongResult

pytestmark = pytest.mark.usefixtures("nothing_to_release")

CPU = torch.device("cpu")
GPU_FIELDS = ("gpu_ms", "busy_ms", "kernels", "copies")


def test_quick_form(tmp_path, capsys):
    path = tmp_path / "rows.jsonl"
    rows = host.main(["--quick", "--device", "cpu", "--out", str(path)])
    assert common.read_rows(path) == json.loads(json.dumps(rows))
    cases = [("forward", 96), ("both", 96), ("forward", 160), ("both", 160), ("decode", 96)]
    assert [(row["provider"], row["pass"], row["T"]) for row in rows] == [
        (name, *case) for case in cases for name in ("dense", "sparse")
    ]
    for row in rows:
        assert 0 < row["host_ms"] <= row["wall_ms"] and row["repeats"] == 3
        assert all(row[field] is None for field in GPU_FIELDS)
        assert 0 < row["error_share"] <= 1 and row["dim"] == 32 and row["gpu"].startswith("none")
    printed = capsys.readouterr().out
    assert printed.startswith("|  | sparse | dense | sparse / dense | target |")
    assert "| both, 160: host_ms |" in printed and "ratio <= 2 |" in printed


@pytest.mark.slow
def test_first_calls(tmp_path):
    path = tmp_path / "rows.jsonl"
    rows = host.main(["--quick", "--first-call", "--device", "cpu", "--out", str(path)])
    assert common.read_rows(path) == json.loads(json.dumps(rows))
    forms = [(row["provider"], row["form"]) for row in rows]
    common_forms = ["first", "again", "length", "batch"]
    assert forms == [
        *(("dense", form) for form in common_forms),
        *(("sparse", form) for form in (*common_forms, "documents", "other documents")),
    ]
    assert all(row["seconds"] > 0 and row["compiled"] is None for row in rows)


def test_kernels_are_counted_in_triton_s_cache(tmp_path):
    for name in ("a/one.cubin", "a/one.json", "b/two.cubin"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    assert host.compiled(tmp_path) == 2


class Wrong(host.DenseAttention):
    def forward(self, x, cache=None):
        out = super().forward(x, cache)
        return out * 1.001 if self.backend == "auto" else out


class WrongDecode(host.DenseAttention):
    def forward(self, x, cache=None):
        out = super().forward(x, cache)
        return out * 1.001 if cache is not None else out


@pytest.mark.parametrize(("kind", "message"), [(Wrong, "out errs"), (WrongDecode, "decode errs")])
def test_a_wrong_layer_is_not_timed(kind, message, monkeypatch):
    plan, build = host.tiny(), host.layer_of

    def layer_of(name, plan, device):
        return kind(plan.dim, 4, 2, 16) if name == "dense" else build(name, plan, device)

    with pytest.raises(WrongResult, match=message):
        host.check(layer_of("dense", plan, CPU), "dense", plan, CPU)
    monkeypatch.setattr(host, "layer_of", layer_of)
    rows = host.run(plan, CPU)
    assert rows[0]["failed"].startswith("wrong: ") and "host_ms" not in rows[0]
    assert {row["provider"] for row in rows[1:]} == {"sparse"}


def test_twin_has_the_projections_and_positions_of_the_layer():
    plan = host.tiny()
    sparse, dense = (host.layer_of(name, plan, CPU) for name in ("sparse", "dense"))
    shapes = {name: p.shape for name, p in dense.named_parameters()}
    assert set(shapes) == {"norm.weight", "to_qkv.weight", "combine_heads.weight"}
    assert shapes.items() <= {name: p.shape for name, p in sparse.named_parameters()}.items()
    assert torch.equal(dense.rotary.freqs, sparse.rotary_emb.freqs)


def test_summary_of_a_trace():
    """Kernels on two streams overlap; copies are counted apart; host events are left out."""
    events = [
        {"cat": "kernel", "ts": 0.0, "dur": 10.0},
        {"cat": "kernel", "ts": 5.0, "dur": 10.0},
        {"cat": "kernel", "ts": 6.0, "dur": 1.0},
        {"cat": "gpu_memset", "ts": 20.0, "dur": 2.0},
        {"cat": "cuda_runtime", "ts": 0.0, "dur": 50.0},
        {"ph": "M"},
    ]
    expected = {"gpu_ms": 0.021, "busy_ms": 0.017, "kernels": 3, "copies": 1}
    assert host.summary(events) == expected


def test_table():
    row = {"provider": "sparse", "pass": "both", "T": 16384, "host_ms": 8.0, "wall_ms": 16.0}
    row |= {"kernels": 44, "copies": 1, "gpu": "GPU", "torch": "2.11", "triton": "3.6"}
    row |= {"commit": "abcdef0123"}
    dense = row | {"provider": "dense", "host_ms": 4.0, "wall_ms": 24.0, "kernels": 65}
    first = row | {"pass": "first call", "form": "first", "T": 2048, "seconds": 12.5}
    for field in ("host_ms", "wall_ms", "kernels", "copies"):
        del first[field]
    first["compiled"] = 30
    assert host.table([row | {"gpu": "other"}, dense, row, first]).splitlines() == [
        "|  | sparse | dense | sparse / dense | target |",
        "| --- | --- | --- | --- | --- |",
        "| both, 16k: host_ms | 8 | 4 | 2.00 | ratio <= 2 |",
        "| both, 16k: wall_ms | 16 | 24 | 0.67 | ratio <= 1/1.5 |",
        "| both, 16k: kernels | 44 | 65 | 0.68 | sparse <= 45 |",
        "| both, 16k: copies | 1 | 1 | 1.00 |  |",
        "| first call, first, 2k: seconds | 12.5 |  |  | sparse <= 15 s |",
        "| first call, first, 2k: compiled | 30 |  |  |  |",
        "",
        "GPU, torch 2.11, triton 3.6, commit abcdef0.",
    ]
    assert host.table([]) == host.NO_ROWS


# the page


def test_page_is_drawn_from_the_rows():
    page = host_report.PAGE.read_text(encoding="utf-8")
    assert host_report.render(page, common.read_rows(host.RESULTS)) == page


def test_tables_of_the_page():
    """The latest rows of one GPU; what has no dense twin stands alone."""
    known = {"gpu": "a GPU", "torch": "2", "triton": "3", "commit": "abcdefghij"}
    wall = {"pass": "both", "T": 2048, "host_ms": 1.0, "busy_ms": None, "kernels": 18, **known}
    first = {"pass": "first call", "form": "documents", "T": 2048, "seconds": 7.25, **known}
    rows = [
        {**wall, "provider": "sparse", "wall_ms": 9.0, "gpu": "another GPU"},
        {**wall, "provider": "sparse", "wall_ms": 8.0},
        {**wall, "provider": "dense", "wall_ms": 2.0},
        {**wall, "provider": "sparse", "wall_ms": 3.0, "kernels": 27},
        {**first, "provider": "sparse", "compiled": 14, "gpu": "another GPU"},
        {"provider": "sparse", "failed": "wrong", **known},
    ]
    drawn = host_report.wall_table(rows)
    assert drawn.startswith("| sparse (times dense) | both passes, 2k |")
    assert "| wall, ms | 3 (1.50) |" in drawn and "| kernels | 27 (1.50) |" in drawn
    assert "| GPU, ms |  |" in drawn and drawn.endswith("a GPU, torch 2, triton 3; abcdefg.")
    assert "| packed documents, 2k | 7.25 |  | 14 |" in host_report.first_call_table(rows)
    assert host_report.wall_table([]) == host_report.NO_ROWS == host_report.first_call_table([])
