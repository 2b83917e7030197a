"""See what a model's sparse layers read: `collect`, pictures, and a page to look around in."""

from .collector import Collection, Reading, collect

__all__ = ["Collection", "Reading", "collect"]
