"""See what a model's sparse layers read: `collect`, pictures, and a page to look around in."""

from .collector import Collection, Reading, collect
from .pages import page
from .plots import plot_gates, plot_mass, plot_selection
from .texts import byte_texts, token_texts

__all__ = [
    "Collection",
    "Reading",
    "byte_texts",
    "collect",
    "page",
    "plot_gates",
    "plot_mass",
    "plot_selection",
    "token_texts",
]
