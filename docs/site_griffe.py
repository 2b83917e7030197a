"""Shows the arguments that the decorator `takes_documents` adds to a function."""

from __future__ import annotations

import ast
import inspect
import re
from pathlib import Path

import griffe

PACKED = Path(__file__).resolve().parent.parent / "native_sparse_attention" / "ops" / "packed.py"
ADDED = ("cu_seqlens", "segment_ids", "mask")


def documentation() -> str:
    """The lines `name: text` of the added arguments, as `packed.py` has them."""
    for node in ast.parse(PACKED.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "DOCUMENTATION":
            text = inspect.cleandoc(ast.literal_eval(node.value))
            return text[text.index("\n\n") + 2 :]  # without its heading, which `semantics.md` has
    raise LookupError("no DOCUMENTATION in packed.py")


class TakesDocuments(griffe.Extension):
    def on_function(self, *, func: griffe.Function, **kwargs) -> None:
        if not any(str(d.value) == "takes_documents" for d in func.decorators):
            return
        for name in ADDED:
            keyword = griffe.ParameterKind.keyword_only
            func.parameters.add(
                griffe.Parameter(name, annotation="Tensor | None", kind=keyword, default="None")
            )
        # the entries end the section `Args:`
        text = func.docstring.value
        before, after = re.split(r"\n\n(?=Returns:|Raises:|The remaining)", text, maxsplit=1)
        func.docstring.value = f"{before}\n{documentation()}\n\n{after}"
