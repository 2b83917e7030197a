"""Pictures are Figures of what was recorded, and need matplotlib only when drawn."""

import sys

import pytest
import torch

from native_sparse_attention import collect
from native_sparse_attention.view import plot_gates, plot_mass, plot_selection
from tests.helpers.layers import DIM, SETTINGS, layer
from tests.view.test_collect import IDS, small_model


def read(name, **settings):
    module = layer(torch.float32, **SETTINGS[name] | settings)
    with collect(module, 16) as seen:
        module(torch.randn(2, 61, DIM))
    return seen


def test_selection_draws_each_chosen_block(tmp_path):
    seen = read("paper", query_heads_share_selected_kv=False)
    (reading,) = seen.forward()
    figure = plot_selection(reading, 3, sequence=1)
    (axes,) = figure.axes
    assert axes.get_xlabel() == "key position (tokens)" and "query head 3" in axes.get_title()
    drawn = [len(lines.get_segments()) for lines in axes.collections]
    chosen = [(reading.slots(kind)[1, :, 3] >= 0).sum() for kind in ("initial", "ranked", "local")]
    assert drawn == chosen
    for (first, t), (last, _) in (line for c in axes.collections for line in c.get_segments()):
        assert first % 8 == 0 and first < last <= min(first + 8, t + 1)
    figure.savefig(tmp_path / "selection.png")


def test_selection_of_dense_queries():
    (reading,) = read("one softmax, shared rankings").forward()
    lines = plot_selection(reading).axes[0].collections[-1].get_segments()
    assert len(lines) == reading.dense[0].sum()
    assert all(first == 0 and last == t + 1 for (first, t), (last, _) in lines)


@pytest.fixture(scope="module")
def two_layers():
    model = small_model()
    with collect(model, 16) as seen:
        model(IDS)
    return seen


def test_gates_and_mass_by_layer(two_layers):
    readings = two_layers.forward()
    (axes,) = plot_gates(two_layers).axes
    names = [text.get_text() for text in axes.get_legend().get_texts()]
    assert axes.get_ylim() == (0, 1) and names == ["compressed", "selected", "window"]
    for branch, line in enumerate(axes.lines):
        means = [reading.gates[..., branch].mean().item() for reading in readings]
        assert line.get_ydata() == pytest.approx(means, abs=1e-6)
    axes, colors = plot_mass(two_layers).axes
    table = torch.tensor(axes.images[0].get_array().data)
    torch.testing.assert_close(table, torch.stack([100 * r.mass.mean((0, 1)) for r in readings]))
    assert colors.get_ylabel() == "% of full attention"


def test_what_cannot_be_drawn(two_layers):
    window, (reading,) = read("window alone"), read("paper").forward()
    for draw, message in (
        (lambda: plot_selection(window.forward()[0]), "reading must be of a selected branch"),
        (lambda: plot_mass(window), "collection must have a layer with a selected branch"),
        (lambda: plot_gates(window), "collection must have a layer with gates"),
        (lambda: plot_selection(reading, 4), "head must be an integer of .* below 4"),
        (lambda: plot_selection(reading, sequence=2), "sequence must be an integer .* below 2"),
        (lambda: plot_selection(3), "reading must be a Reading of collect, got 3"),
        (lambda: plot_mass(3), "collection must be what collect gives, got 3"),
    ):
        with pytest.raises(ValueError, match=message):
            draw()


def test_without_matplotlib(two_layers, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    for draw in (plot_gates, plot_mass, lambda seen: plot_selection(seen.forward()[0])):
        with pytest.raises(ImportError, match=r"pip install -e '.\[plot\]'"):
            draw(two_layers)
