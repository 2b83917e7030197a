"""The pages of the documentation have the tables of the rows that are there; plots are drawn."""

import pytest

pytest.importorskip("transformers", reason="needs the extra hf")

from benchmarks import (
    attention,
    common,
    decode,
    distillation,
    generation,
    layer,
    learning,
    masks,
    memory,
    performance,
    pretrained,
    recall,
    training,
)

MODULES = (decode, distillation, generation, layer, learning, masks, memory, pretrained, recall)
CASES = [(module.RESULTS, module.TABLES) for module in (*MODULES, training)]
CASES.append((attention.RESULTS, {performance.PAGE: performance.TABLES}))


@pytest.mark.parametrize(("results", "tables"), CASES, ids=lambda v: getattr(v, "stem", ""))
def test_pages_are_drawn_from_the_rows(results, tables):
    """Where this fails: `make docs`."""
    rows, found = common.read_rows(results), set()
    assert rows
    for path, of_page in tables.items():
        page = path.read_text(encoding="utf-8")
        assert common.render(page, of_page, rows) == page
        found |= {name for name in of_page if f"<!-- begin: {name} -->" in page}
        assert {table([]) for table in of_page.values()} == {common.NO_ROWS}
    assert found == set().union(*tables.values())


@pytest.mark.slow
@pytest.mark.parametrize("module", [attention, decode, learning, recall])
def test_table_option_redraws_pages_and_plots(module, tmp_path, monkeypatch):
    owner = performance if module is attention else module
    tables = {performance.PAGE: performance.TABLES} if module is attention else module.TABLES
    pages = {tmp_path / path.name: of_page for path, of_page in tables.items()}
    for page, of_page in pages.items():
        text = "".join(f"<!-- begin: {name} --><!-- end: {name} -->\n" for name in of_page)
        page.write_text(text, encoding="utf-8")
    draw_pages = common.draw_pages
    monkeypatch.setattr(common, "draw_pages", lambda _, rows: draw_pages(pages, rows))
    monkeypatch.setattr(owner, "PLOT", tmp_path / "plot.png")
    module.main(["--table"])
    assert (tmp_path / "plot.png").stat().st_size > 1000
    assert all("| " in page.read_text(encoding="utf-8") for page in pages)


def test_rows_are_appended_whole(tmp_path):
    path = tmp_path / "new" / "rows.jsonl"
    for n in range(3):
        common.append_row(path, {"n": n})
    assert common.read_rows(path) == [{"n": n} for n in range(3)]
    assert [file.name for file in path.parent.iterdir()] == ["rows.jsonl"]
    assert common.read_rows(tmp_path / "none.jsonl") == []


def test_quantiles():
    assert common.quantiles([float(n) for n in range(11)]) == dict(p20_ms=2, p50_ms=5, p80_ms=8)
    assert common.quantiles([3.0]) == dict(p20_ms=3, p50_ms=3, p80_ms=3)
