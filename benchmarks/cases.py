"""Rows of benchmarks/results/attention.jsonl by what they are of."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

from .common import Row

NO_ROWS = "no rows yet"
PASSES = ("forward", "backward")

# (H, K), provider, part, selection_stride, how many neighbours of random indices are alike
Case = tuple[tuple[int, int], str, str, int, int | None]


class Rows:
    """The latest rows of one GPU, by default that of the most rows: case -> T -> pass -> row
    ("failed" in place of a pass)."""

    def __init__(self, rows: list[Row], gpu: str | None = None) -> None:
        if gpu is None and rows:
            gpu = Counter(row["gpu"] for row in rows).most_common(1)[0][0]
        # a peer that cannot run a setting leaves a row for the reader of the rows alone
        self.used = [row for row in rows if row["gpu"] == gpu and "refused" not in row]
        self.cases: dict[Case, dict[int, dict[str, Row]]] = {}
        for row in self.used:
            heads = (row["H"], row["K"])
            case = (heads, row["provider"], row["part"], row["selection_stride"], row.get("alike"))
            passes = self.cases.setdefault(case, {}).setdefault(row["T"], {})
            if "failed" in row or "failed" in passes:
                passes.clear()
            passes[row.get("pass", "failed")] = row

    def of(self, **wanted: Any) -> list[Case]:
        """Cases by heads, provider, part, stride, alike: providers as they were first timed."""
        fields = ("heads", "provider", "part", "stride", "alike")
        first: dict[tuple[str, str], int] = {}
        for index, case in enumerate(self.cases):
            first.setdefault(case[1:3], index)
        found = [
            case
            for case in self.cases
            if wanted.items() <= dict(zip(fields, case, strict=True)).items()
        ]
        return sorted(found, key=lambda case: (first[case[1:3]], case[3], case[4] or 0))

    def lengths(self, cases: Iterable[Case]) -> list[int]:
        timed = (
            T for case in cases for T, rows in self.cases[case].items() if "failed" not in rows
        )
        return sorted(set(timed))

    def heads(self) -> list[tuple[int, int]]:
        return sorted({case[0] for case in self.cases}, key=lambda heads: (-heads[0], heads[1]))

    def pair(self, case: Case, T: int, field: str) -> list[float | None]:
        """A field of the forward and of the backward row."""
        passes = self.cases.get(case, {}).get(T, {})
        return [passes.get(name, {}).get(field) for name in PASSES]


def length(T: int) -> str:
    return f"{T // 1024}k" if T % 1024 == 0 else str(T)


def named(case: Case) -> str:
    _, provider, part, stride, alike = case
    name = provider if part == "whole" else f"{part}, {provider}"
    if stride > 1:
        name += f", `selection_stride={stride}`"
    return name if alike is None else f"{name}, {alike} alike"
