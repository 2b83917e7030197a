"""No sum of floats depends on the order in which programs come: atomic operations are named here,
each with why its order is of no matter."""

import ast
import re
from pathlib import Path

KERNELS = Path(__file__).resolve().parents[2] / "native_sparse_attention" / "kernels"

# in a string: by name, or in PTX
MENTION = re.compile(r"atomic_|\b(atom|red)\.")

ARRIVALS = "counts programs: all that reads the integer is whether, or which, program was the last"
PERMITTED = {
    ("decode/step.py", "tl.atomic_add(counter, 1, sem='acq_rel')"): ARRIVALS,
    ("decode/persistent.py", "tl.atomic_add(counter, 0, sem='relaxed')"): "reads such a count",
    ("decode/step.py", "tl.atomic_add(counter, 0, sem='acquire')"): "reads such a count",
    ("decode/step.py", "tl.atomic_add(reduce_started, 1, sem='relaxed')"): ARRIVALS,
}  # fmt: skip


def name_of(node):
    """Of a variable, an attribute or what is imported; else empty."""
    named = {ast.Name: "id", ast.Attribute: "attr", ast.alias: "name"}
    return getattr(node, named.get(type(node), ""), "")


def atomics(source):
    """Every call of an atomic operation, as `ast` writes it, and every other mention of one in
    code: under another name, by a string, in PTX."""
    tree = ast.parse(source)
    documented = (ast.Module, ast.FunctionDef, ast.ClassDef)
    docstrings = {ast.get_docstring(n, False) for n in ast.walk(tree) if isinstance(n, documented)}
    called = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and "atomic_" in name_of(node.func):
            called.add(node.func)
            yield ast.unparse(node)
    for node in ast.walk(tree):
        if "atomic_" in name_of(node) and node not in called:
            yield name_of(node)
        text = node.value if isinstance(node, ast.Constant) else None
        if isinstance(text, str) and text not in docstrings and MENTION.search(text):
            yield text


def test_atomic_operations_are_integers_in_any_order():
    found = {
        (path.relative_to(KERNELS).as_posix(), call)
        for path in KERNELS.rglob("*.py")
        for call in atomics(path.read_text(encoding="utf-8"))
    }
    assert found == set(PERMITTED)
