"""The benchmark of masks on a CPU: it runs end to end, it refuses what is wrong, and counts what a
mask allows."""

from __future__ import annotations

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


def test_every_mask_of_the_catalogue_but_those_of_other_keys_is_timed():
    for name in catalog.CATALOG.keys() - masks.ASYMMETRIC:
        assert masks.facts(masks.Mask(name), 144, CPU)["pairs"] > 0
