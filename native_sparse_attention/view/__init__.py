"""See what a model's sparse layers read: `collect`, pictures, and a page to look around in."""

from .collector import Collection, Reading, collect
from .pages import byte_texts, page, token_texts
from .plots import plot_gates, plot_mass, plot_selection

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
