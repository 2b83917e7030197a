"""Every benchmark runs in its quick form; pages have the tables of the rows that are there."""

import importlib
import json

import pytest

pytest.importorskip("transformers", reason="needs the extra hf")

from benchmarks import common

pytestmark = pytest.mark.usefixtures("nothing_to_release")

NAMES = "attention clock decode distillation distributed generation learning pretrained recall"
MODULES = {name: importlib.import_module(f"benchmarks.{name}") for name in NAMES.split()}
FAST = ["--seconds", "1e-4"]
# module, options, fields of every row that was measured, how many rows were
QUICK = [
    ("attention", FAST, ["p50_ms", "error_share"], 32),
    ("decode", [*FAST, "--new", "1", "2"], ["p50_us", "error_share"], 20),
    ("distillation", [], ["loss", "above", "found"], 6),
    pytest.param(
        "generation", [], ["prefill_ms", "dynamic_tokens_per_s"], 7, marks=pytest.mark.slow
    ),
    (
        "clock",
        ["--subjects", "layer, 32/8", "llama", "--forms", "dense", "one softmax"],
        ["error_share", "run", "mode"],
        4,
    ),
    (  # of AdamW: torch 2.8 has no Muon
        "learning",
        ["--recipe", "old", "--variants", "dense", "paper's ranking, means"],
        ["bits", "curve", "config"],
        2,
    ),
    ("pretrained", [], ["loss", "above", "found", "right"], 23),
    ("recall", ["--variants", "dense", "published, windows of 32"], ["accuracy", "curve"], 2),
]


@pytest.mark.parametrize("name, options, fields, count", QUICK)
def test_quick_form(name, options, fields, count, tmp_path, capsys):
    out = tmp_path / "results" / "rows.jsonl"
    if name == "distillation":
        for i in range(4):
            (tmp_path / f"{i}.c").write_text(f"int a{i} = {i};\n" * 200)
        options = ["--data", str(tmp_path)]
    rows = MODULES[name].main(["--quick", "--device", "cpu", "--out", str(out), *options])
    assert common.read_rows(out) == json.loads(json.dumps(rows))
    assert len(capsys.readouterr().out.splitlines()) >= len(rows)
    measured = [row for row in rows if "refused" not in row]
    assert len(measured) == count
    for row in rows:
        assert row["gpu"].startswith("none") and row["torch"] and row["date"]
        assert "failed" not in row and row.get("error_share", 0) in (None, pytest.approx(0.5, 1))
    assert all(field in row for row in measured for field in fields)


@pytest.mark.parametrize("module", MODULES.values(), ids=MODULES)
def test_pages_are_drawn_from_the_rows(module):
    """Where this fails: `make docs`."""
    rows, drawn = common.read_rows(module.BENCHMARK.results), set()
    assert rows
    for path, of_page in module.TABLES.items():
        page = path.read_text(encoding="utf-8")
        assert common.render(page, of_page, rows) == page
        drawn |= {name for name in of_page if f"<!-- begin: {name} -->" in page}
        assert {table([]) for table in of_page.values()} == {common.NO_ROWS}
    assert drawn == set().union(*module.TABLES.values())


@pytest.mark.slow
@pytest.mark.parametrize("name", ["attention", "learning"])
def test_table_option_redraws_pages_and_plots(name, tmp_path, monkeypatch):
    module = MODULES[name]
    pages = {tmp_path / path.name: of_page for path, of_page in module.TABLES.items()}
    for page, of_page in pages.items():
        text = "".join(f"<!-- begin: {name} --><!-- end: {name} -->\n" for name in of_page)
        page.write_text(text, encoding="utf-8")
    monkeypatch.setitem(vars(module.BENCHMARK), "tables", pages)
    monkeypatch.setattr(module, "PLOT", tmp_path / "plot.png")
    module.main(["--table"])
    assert (tmp_path / "plot.png").stat().st_size > 1000
    assert all("| " in page.read_text(encoding="utf-8") for page in pages)


def test_a_failure_takes_the_place_of_older_rows():
    """What else a grid does, the pages show."""
    row = {"line": "a", "T": 2048, "pass": "forward", "p50_ms": 1.0}
    failed = {"line": "a", "T": 2048, "failed": "out of memory"}

    def draw(*rows):
        keys = (lambda row: row["line"], lambda row: row["T"])
        return common.grid(rows, "ms", *keys, lambda passes: common.both(passes, "p50_ms"))

    assert "| a | 1.00 / - |" in draw(row) and "| a | failed |" in draw(row, failed)
    assert "| a | 1.00 / - |" in draw(row, failed, row)
    assert "| b |" not in draw(row, row | {"line": "b", "p50_ms": None})  # a line of nothing
    assert common.failures([failed, failed], lambda row: row["line"]) == "* a: out of memory"


def test_rows_are_appended_whole(tmp_path):
    path = tmp_path / "new" / "rows.jsonl"
    for n in range(3):
        common.append_row(path, {"n": n})
    assert common.read_rows(path) == [{"n": n} for n in range(3)]
    assert [file.name for file in path.parent.iterdir()] == ["rows.jsonl"]
    assert common.read_rows(tmp_path / "none.jsonl") == []


BAD = [
    ("decode", ["--lengths", "100"], "lengths must be multiples of 16, got 100"),
    ("distillation", ["--T", "1024"], "T must be at least 2176, got 1024"),
    ("distillation", ["--steps", "0"], "steps must be at least 1, got 0"),
    ("generation", ["--s", "48"], "s must divide 64, 512 and 512, got 48"),
    ("generation", ["--forms", "dense"], "forms must be of sdpa, max of 64, .*, got dense"),
    ("generation", ["--new-tokens", "9"], "new_tokens must be at least 10, got 9"),
    ("learning", ["--quick", "--recipe", "old,nothing=1"], "variant dense: .* argument 'nothing'"),
    ("learning", ["--work", "w"], "data must be given to train"),
    ("pretrained", ["--windows", "0"], "windows must be at least 1, got 0"),
    ("pretrained", ["--lengths", "200"], "lengths must be at least 256, got 200"),
    ("recall", ["--quick", "--variants", "nothing"], "must be some of dense, .* 'nothing'"),
    ("recall", ["--variants", "dense"], "work must be given"),
]


@pytest.mark.parametrize("name, options, message", BAD)
def test_bad_arguments(name, options, message):
    with pytest.raises(SystemExit, match=message):
        MODULES[name].main([*options, "--device", "cpu"])
