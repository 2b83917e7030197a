"""Prints the installed distributions that the library alone does not need, triton among them."""

import importlib.metadata
import re

from packaging.requirements import Requirement


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


installed = {normal(d.metadata["Name"]): d for d in importlib.metadata.distributions()}
done, waiting = set(), [("native-sparse-attention", frozenset())]
while waiting:
    name, extras = waiting.pop()
    if (name, extras) in done or name not in installed or name == "triton":
        continue
    done.add((name, extras))
    for text in installed[name].requires or ():
        needs = Requirement(text)
        if not needs.marker or any(needs.marker.evaluate({"extra": e}) for e in {"", *extras}):
            waiting.append((normal(needs.name), frozenset(needs.extras)))
needed = {"pip", *(name for name, _ in done)}
print(*sorted(installed.keys() - needed))
