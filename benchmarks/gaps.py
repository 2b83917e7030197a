"""What of the plan of `benchmarks.attention` has no rows."""

from __future__ import annotations

from .cases import NO_ROWS, Case, Rows, length, named
from .problem import Setting
from .providers import SHORT_WINDOWS, OursSelected, Provider, providers


def plan(rows: Rows) -> list[tuple[Provider, Case]]:
    """What `benchmarks.attention` times on a GPU, of the heads, strides and numbers of neighbours
    alike that there are rows of; one softmax and short windows have tables of their own."""
    known: list[Provider] = [
        provider
        for name, some in providers().items()
        if name not in ("dense-sdpa", SHORT_WINDOWS) and not name.startswith("one-softmax")
        for provider in some
    ]
    alikes = {case[4] for case in rows.cases if case[4] is not None}
    known += [OursSelected(alike) for alike in sorted(alikes)]
    strides = sorted({1, *(case[3] for case in rows.cases)})
    return [
        (provider, (heads, provider.name, provider.part, stride, getattr(provider, "alike", None)))
        for heads in rows.heads()
        for provider in known
        for stride in (strides if provider.strided else (1,))
    ]


def not_run(rows: Rows) -> str:
    """Cases of the plan that have no row, at the lengths of the wholes, of the parts, or of what
    neighbours alike take, whichever a case is; and why, where its provider takes none such."""
    if not rows.cases:
        return NO_ROWS

    def kind(case: Case) -> tuple[bool, bool]:
        return case[2] == "whole", case[4] is None

    timed: dict[tuple[bool, bool], set[int]] = {}
    for case, lengths in rows.cases.items():
        timed.setdefault(kind(case), set()).update(lengths)
    # what was not run, at which lengths: strides by heads; then those alike share a line
    gaps: dict[tuple[str, str, str], list[str]] = {}
    for provider, case in plan(rows):
        every = sorted(timed.get(kind(case), ()))
        left = [T for T in every if T not in rows.cases.get(case, {})]
        if not left:
            continue
        where = "all lengths" if left == every else ", ".join(map(length, left))
        (H, K), stride = case[0], case[3]
        reasons = {provider.unfit(Setting(T, H, K, stride=stride)) for T in left}
        if len(reasons) == 1 and None not in reasons:
            where += f" ({reasons.pop()})"
        name = named((*case[:3], 1, case[4]))
        gaps.setdefault((f"{H}/{K}", where, name), []).append(str(stride))
    by_name: dict[tuple[str, str], list[str]] = {}
    for (heads, where, name), strides in gaps.items():
        if strides != ["1"]:
            name += f" (`selection_stride` {', '.join(strides)})"
        by_name.setdefault((name, where), []).append(heads)
    lines: dict[tuple[str, str], list[str]] = {}
    for (name, where), of in by_name.items():
        lines.setdefault((", ".join(of), where), []).append(name)
    drawn = (f"* H/K = {of}, {where}: {'; '.join(names)}" for (of, where), names in lines.items())
    return "\n".join(drawn) or "none"
