"""The benchmark of masks on a CPU: it runs end to end, refuses what is wrong, counts what a mask
allows, and draws the page that is committed."""

from __future__ import annotations

import importlib.util
import math
from pathlib import Path

import pytest
import torch

from benchmarks import masks
from benchmarks.problem import Setting
from native_sparse_attention.masks import catalog

pytestmark = pytest.mark.usefixtures("nothing_to_release")

CPU = torch.device("cpu")
QUICK = ["--quick", "--device", "cpu", "--seconds", "1e-4"]
SMALL = Setting(144, 2, 2, 16, dtype=torch.float32)
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def flex_on_cpu(flex_gradients, monkeypatch):
    """flex_attention as torch computes it where gradients are let pass."""
    monkeypatch.setattr(masks.Flex, "devices", ("cpu",))
    monkeypatch.setattr(masks, "compiled", lambda: flex_gradients)


@pytest.mark.slow
@pytest.mark.usefixtures("flex_on_cpu")
def test_flex_passes_the_oracle():
    scores = ["alibi, functional", "soft_cap"]
    rows = masks.main([*QUICK, "--masks", "natten", "--scores", *scores])
    timed = [row for row in rows if row["provider"] == "flex"]
    names = ["natten", *(f"causal + {name}" for name in scores)]
    assert [(row["mask"], row["pass"]) for row in timed] == [
        (name, way) for name in names for way in ("forward", "backward")
    ]
    assert all(row["error_share"] <= 1 for row in timed)


class Wider(masks.Flex):
    """Under the mask of another window."""

    def prepare(self, x, setting):
        self.mask = masks.Mask("causal")
        super().prepare(x, setting)
        self.mask = masks.Mask("sliding_window")


class Uncapped(masks.Flex):
    """Without what should become of the scores."""

    def prepare(self, x, setting):
        super().prepare(x, setting)
        self.score_mod = None


class Scaled(masks.Sdpa):
    def call(self, x, setting):
        return super().call(x, setting) * 1.001


@pytest.mark.slow(one_of=3)
@pytest.mark.usefixtures("flex_on_cpu")
@pytest.mark.parametrize("provider", [Wider, Uncapped, Scaled])
def test_what_is_wrong_is_not_timed(provider, monkeypatch):
    monkeypatch.setattr(masks, provider.__bases__[0].__name__, provider)
    what = ["--masks", "sliding_window", "--scores"]
    if provider is Uncapped:
        what = ["--masks", "--scores", "alibi"]
    with pytest.raises(
        SystemExit, match=rf"1 cases failed, .* {provider.name} .*wrong: out errs by"
    ):
        masks.main([*QUICK, *what])


@pytest.mark.parametrize("name", ["causal", "natten", "document"])
def test_operations_are_those_of_the_allowed_pairs(name):
    """4 D H for each pair; the mask's own count by brute force."""
    mask = masks.Mask(name)
    exact = masks.create_mask(mask.mod(144, CPU), 1, 1, 144, 144, device="cpu")[0, 0]
    assert masks.facts(mask, 144, CPU)["pairs"] == exact.sum()
    assert masks.Sdpa(mask).flops(SMALL) == 4 * 16 * 2 * exact.sum()
    assert torch.equal(masks.rows_of(mask, 144, CPU), exact.sum(1))
    some = torch.tensor([0, 143, 7])
    assert torch.equal(masks.seen(mask, 144, some), exact[some])
    if name == "natten":
        assert exact.sum() == 144 * 49
    if name == "causal":
        assert exact.sum() == math.comb(145, 2)


# the page


def made_up(provider, mask, ms, **changes):
    row = {"mask": mask, "provider": provider, "T": 8192, "H": 16, "D": 64, "dtype": "bfloat16"}
    row |= {"gpu": "GPU", "torch": "2", "triton": "3", "commit": "abc"}
    if mask != masks.NO_MASK:
        row |= {"allowed": 0.125, "skipped": 0.75}
    passes = (("forward", ms), ("backward", 2 * ms))
    return [
        {**row, "pass": way, "p50_ms": time, "tflops": 100 / time, **changes}
        for way, time in passes
    ]


def test_table():
    rows = made_up("flash", masks.NO_MASK, 1.0)
    rows += made_up("sdpa", "natten", 20.0) + made_up("flex", "natten", 4.0)
    text = masks.table(rows)
    assert "T = 8192, H = 16, D = 64, bfloat16:" in text
    assert "| *causal, flash* |  |  | 1.00 / 2.00 | 100 / 50.0 |  |  |" in text
    line = "| `natten` | 12.5 | 75.0 | 20.0 / 40.0 | 5.00 / 2.50 | 4.00 / 8.00 | 25.0 / 12.5 |"
    assert line in text and text.endswith("GPU, torch 2, triton 3, commit abc.")
    widths = {row.count("|") for row in text.splitlines() if row.startswith("|")}
    assert widths == {8}
    # the latest row counts, a failure too
    failed = {k: v for k, v in rows[-1].items() if k not in ("pass", "p50_ms", "tflops")}
    failed["failed"] = "out | of memory"
    text = masks.table([*rows, failed])
    assert "5.00 / 2.50 | out / of memory |  |" in text and "4.00 / 8.00" not in text
    assert masks.table([*rows, failed, *rows]) == masks.table(rows)


def test_every_mask_of_the_catalogue_but_those_of_other_keys_is_timed():
    for name in catalog.CATALOG.keys() - masks.ASYMMETRIC:
        assert masks.facts(masks.Mask(name), 144, CPU)["pairs"] > 0


@pytest.mark.slow
def test_pictures_can_be_drawn(tmp_path, monkeypatch):
    """As they are committed, one for each mask, and small."""
    spec = importlib.util.spec_from_file_location("draw_gallery", ROOT / "docs/draw_gallery.py")
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    committed = {path.name: path for path in script.PICTURES.glob("*.png")}
    monkeypatch.setattr(script, "PICTURES", tmp_path)
    script.main()
    assert {path.name for path in tmp_path.iterdir()} == set(committed)
    assert sum(path.stat().st_size for path in committed.values()) < 400_000
    page = masks.PAGE.read_text(encoding="utf-8")
    assert all(f"(masks/{name})" in page for name in committed)
