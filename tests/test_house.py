"""The rules of the house that no linter knows: who imports whom, what an import may cost, and that
the documentation runs."""

from __future__ import annotations

import ast
import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = "native_sparse_attention"

# Top to bottom. A module may import from the rows below its own and from nowhere else, so that
# modules of one row do not know each other. The exceptions are named in SAME_ROW.
LAYERS: tuple[frozenset[str], ...] = (
    frozenset({""}),  # the package itself: public names only, and nothing below imports from it
    frozenset({"transformer"}),
    frozenset({"sparse_kwargs"}),
    frozenset({"attention"}),
    frozenset({"decoding", "runs", "sampling"}),
    frozenset({"fixed", "ops.decode", "ops.writes"}),
    frozenset({"ops.nsa", "paged_cache"}),
    frozenset(
        {
            "ops.functional",
            "ops.functional_selection",
            "compress",
            "cache",
            "gate",
            "networks",
            "rotary",
            "settings",
        }
    ),
    frozenset({"ops.backends"}),
    frozenset({"ops.eager"}),
    frozenset({"ops.by_queries"}),
    frozenset({"ops.fused", "ops.library", "ops.ranking", "ops.rotary", "ops.tiled"}),
    frozenset({"ops.branches", "ops.gathered"}),
    frozenset({"ops.reference", "ops.flex", "ops.local", "ops.operators", "masks.__main__"}),
    frozenset({"ops.chunked", "ops.block_masked", "ops.mha"}),
    frozenset({"ops.bands"}),
    frozenset(
        {"masks", "ops.selection", "ops.block_sizes", "ops.online", "ops.packed", "ops.segments"}
    ),
    frozenset({"masks.catalog"}),
    frozenset({"masks.jagged", "masks.pictures"}),
    frozenset({"masks.dense"}),
    frozenset({"masks.gallery", "masks.nsa", "masks.scores"}),
    frozenset({"masks.spans"}),
    frozenset({"masks.constants", "masks.tanh", "masks.tiles"}),
    frozenset(
        {
            "kernels.ranking.scoring",
            "kernels.selected",
            "kernels.decode.step_launch",
            "kernels.gates",
            "kernels.rotary",
        }
    ),
    frozenset({"kernels.decode.step", "kernels.decode.ahead_launch"}),
    frozenset({"kernels.decode.ahead", "kernels.decode.call"}),
    frozenset(
        {
            "kernels.interval_backward",
            "kernels.ranking.probs",
            "kernels.gate_launch",
            "kernels.decode.branches",
            "kernels.decode.ranking",
        }
    ),
    frozenset(
        {
            "kernels.combine",
            "kernels.interval",
            "kernels.listed.gather",
            "kernels.listed.pairs",
            "kernels.ranking.block_keys",
        }
    ),
    frozenset({"kernels.listed.spans"}),
    frozenset(
        {
            "kernels.hopper.gather_launch",
            "kernels.hopper.interval_launch",
            "kernels.hopper.listed_launch",
            "kernels.hopper.ranking_launch",
            "kernels.hopper.shared_launch",
        }
    ),
    frozenset(
        {
            "kernels.hopper.gather_dq",
            "kernels.hopper.gather_forward",
            "kernels.hopper.interval_dkv",
            "kernels.hopper.interval_dq",
            "kernels.hopper.interval_forward",
            "kernels.hopper.listed_backward",
            "kernels.hopper.listed_forward",
            "kernels.hopper.probs_ranking",
        }
    ),
    frozenset(
        {
            "kernels.entries",
            "kernels.gate_steps",
            "kernels.listed.gather_steps",
            "kernels.hopper.gather_rows",
            "kernels.hopper.gpu",
            "kernels.hopper.intervals",
            "kernels.hopper.listed_rows",
            "kernels.hopper.shared_blocks",
            "kernels.limits",
            "kernels.norms",
            "kernels.listed.unite",
        }
    ),
    frozenset({"kernels.launch", "kernels.listed.inverse", "kernels.listed.join"}),
    frozenset(
        {
            "kernels.decode.arrivals",
            "kernels.device",
            "kernels.hopper.dialect",
            "kernels.hopper.epilogue",
            "kernels.hopper.gradients",
            "kernels.hopper.ring",
            "kernels.shares",
            "kernels.sizes",
            "kernels.streams",
            "kernels.tiles",
            "kernels.ranking.topn",
        }
    ),
    frozenset({"kernels.counts"}),
    frozenset({"frequencies", "ops.documents", "ops.products", "rows"}),
    frozenset({"identity", "ops.autocast", "ops.checks", "entries", "ids"}),
    frozenset({"ops.scalars", "ops.keywords", "ops.transforms"}),
    frozenset({"blocks", "initialization", "ops.graphs"}),
    # the folders' own __init__: a docstring, no imports
    frozenset(
        {
            "ops",
            "kernels",
            "kernels.decode",
            "kernels.hopper",
            "kernels.listed",
            "kernels.ranking",
        }
    ),
)
SAME_ROW: frozenset[tuple[str, str]] = frozenset()

MAX_LINES = 600
DOCUMENTS = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
SOURCES = sorted((ROOT / PACKAGE).rglob("*.py"))
AROUND = sorted(
    path for folder in ("benchmarks", "tests", "training") for path in (ROOT / folder).glob("*.py")
)

# Written as patterns, which do not match themselves.
FORBIDDEN = {
    "the address of a package registry": re.compile(
        r"pypi\.org|pythonhosted\.org|download\.pytorch\.org|anaconda\.org|--(extra-)?index-url"
    ),
    "a path of somebody's machine": re.compile(r"(?<![\w.$~}-])/(home|root|Users|work)/\w"),
}


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def module_name(path: Path) -> str:
    """`ops/flex.py` is "ops.flex", `ops/__init__.py` is "ops", the package itself is ""."""
    parts = path.relative_to(ROOT / PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): path for path in SOURCES}


def row_of(module: str) -> int:
    for row, members in enumerate(LAYERS):
        if module in members:
            return row
    raise LookupError(
        f"module {module!r} has no row in LAYERS of tests/test_house.py: "
        "add it to the row that says what it may import"
    )


def absolute(module: str, node: ast.ImportFrom) -> str:
    """The dotted name that `from X import ...` inside `module` names, dots resolved."""
    if not node.level:
        return node.module or ""
    package = [PACKAGE, *filter(None, module.split("."))]
    if MODULES[module].name != "__init__.py":
        package.pop()
    base = package[: len(package) - node.level + 1]
    return ".".join(base + ([node.module] if node.module else []))


def imports_of(module: str) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of each import in a module, those inside functions and under
    TYPE_CHECKING included. A submodule is named in full, a name of a module by its module."""
    for node in ast.walk(ast.parse(MODULES[module].read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = absolute(module, node)
            for alias in node.names:
                full = f"{base}.{alias.name}"
                is_module = full.removeprefix(f"{PACKAGE}.") in MODULES
                yield node.lineno, full if is_module else base
        elif isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            if called not in ("import_module", "importlib.import_module", "__import__"):
                continue
            literal = len(node.args) == 1 and isinstance(node.args[0], ast.Constant)
            assert literal, (
                f"{relative(MODULES[module])}:{node.lineno}: {called}() of a computed name hides "
                "from this test; write the whole dotted name as its one argument"
            )
            yield node.lineno, node.args[0].value


def test_every_module_has_one_row():
    for module in MODULES:
        row_of(module)
    assert sum(map(len, LAYERS)) == len(frozenset().union(*LAYERS)), "a module stands in two rows"


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module or PACKAGE)
def test_imports_point_downward(module):
    wrong = []
    for line, name in imports_of(module):
        root, _, target = name.partition(".")
        where = f"{relative(MODULES[module])}:{line}"
        in_kernels = module.startswith("kernels.")
        if root == "triton" and not in_kernels:
            wrong.append(f"{where}: imports triton; only kernels/ may")
        if root != PACKAGE or (module, target) in SAME_ROW:
            continue
        if row_of(target) <= row_of(module):
            wrong.append(f"{where}: {module} imports {target or PACKAGE}, not below it")
        callers = (
            "ops.block_sizes", "ops.branches", "ops.decode", "ops.fused", "ops.library",
            "ops.operators", "ops.rotary", "ops.selection", "ops.writes",
        )  # fmt: skip
        if target.startswith("kernels") and not in_kernels and module not in callers:
            wrong.append(f"{where}: {module} imports {target}; only {callers} call kernels")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module or PACKAGE)
def test_package_raises_and_warns_but_never_asserts_or_prints(module):
    path = MODULES[module]
    wrong = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Assert):
            wrong.append(f"{relative(path)}:{node.lineno}: assert; raise ValueError instead")
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "print":
            wrong.append(f"{relative(path)}:{node.lineno}: print; return, raise or warn instead")
    assert not wrong, "\n".join(wrong)


def run_python(code: str, **env: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **env},
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr


def test_kernels_call_no_builtin_that_older_versions_of_triton_lack():
    """`min` and `max` of numbers known at compile time: Triton 3.4 and 3.5 take them for those of
    tensors. Neither the interpreter nor a later Triton minds."""
    found = []
    for path in (ROOT / PACKAGE / "kernels").rglob("*.py"):
        for function in ast.walk(ast.parse(path.read_text())):
            if not isinstance(function, ast.FunctionDef):
                continue
            if not any("triton.jit" in ast.unparse(name) for name in function.decorator_list):
                continue
            calls = (node for node in ast.walk(function) if isinstance(node, ast.Call))
            names = {ast.unparse(call.func) for call in calls} & {"min", "max"}
            found += [f"{relative(path)}: {function.name} calls {name}" for name in sorted(names)]
    assert not found, "\n".join(found)


def test_import_needs_no_triton_and_no_gpu():
    run_python(
        """
import sys
sys.modules["triton"] = None  # from here `import triton` raises ImportError

import native_sparse_attention, torch

assert not torch.cuda.is_initialized(), "the import initialised CUDA"
""",
        CUDA_VISIBLE_DEVICES="",
    )


def test_import_loads_no_kernel_and_asks_nothing_of_cuda():
    """With triton and a GPU at hand too: workers fork after the import."""
    run_python(
        """
import sys, torch, einops, einx, local_attention, rotary_embedding_torch

def asked(*args, **kwargs):
    raise RuntimeError("CUDA was asked for at import")

for name in ("_lazy_init", "is_available", "device_count", "current_device"):
    setattr(torch.cuda, name, asked)

import native_sparse_attention

loaded = [name for name in sys.modules if name.startswith("native_sparse_attention.kernels.")]
assert not loaded, f"the import loaded {loaded}"
"""
    )


def python_blocks(document: Path) -> Iterator[tuple[int, str]]:
    """(line of the first statement, code) of each block fenced as python."""
    text = document.read_text(encoding="utf-8")
    for block in re.finditer(r"^```python\n(.*?)^```$", text, re.DOTALL | re.MULTILINE):
        yield text.count("\n", 0, block.start(1)) + 1, block[1]


@pytest.mark.parametrize(
    ("document", "line", "code"),
    [
        pytest.param(document, line, code, id=f"{relative(document)}:{line}")
        for document in DOCUMENTS
        if document.exists()
        for line, code in python_blocks(document)
    ],
)
def test_documentation_runs(document, line, code):
    # newlines in front, so that a traceback names the line of the document
    source = compile("\n" * (line - 1) + code, str(document), "exec")
    exec(source, {"__name__": "__main__"})


def test_pictures_can_be_drawn(tmp_path, monkeypatch):
    """`make docs` works; what the pictures show is what the other tests hold."""
    spec = importlib.util.spec_from_file_location("draw_masks", ROOT / "docs" / "draw_masks.py")
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    monkeypatch.setattr(script, "IMAGES", tmp_path)
    script.main()
    committed = sorted(path.name for path in (ROOT / "docs" / "images").glob("*.png"))
    drawn = sorted(path.name for path in tmp_path.iterdir())
    assert set(drawn) <= set(committed), "a new picture: run `make docs` and commit it"


@pytest.mark.parametrize("path", [*SOURCES, *AROUND], ids=relative)
def test_file_is_short_enough_to_read(path):
    lines = len(path.read_text(encoding="utf-8").splitlines())
    assert lines <= MAX_LINES, f"{relative(path)} has {lines} lines: at most {MAX_LINES}, split it"


def published_files() -> list[Path]:
    """What a reader of the repository sees, less pictures, other people's data and packages."""
    folders = (PACKAGE, "tests", "docs", "benchmarks", "training", ".ci", ".github")
    kinds = {".py", ".md", ".toml", ".yml", ".yaml", ".sh", ""}
    inside = [path for folder in folders for path in (ROOT / folder).rglob("*")]
    return sorted(
        path
        for path in [*ROOT.iterdir(), ROOT / "data" / "README.md", *inside]
        if path.is_file()
        and path.suffix in kinds
        and path.name != ".git"
        and ".published" not in path.parts
    )


@pytest.mark.parametrize("what", FORBIDDEN)
def test_nothing_private_is_published(what):
    found = [
        f"{relative(path)}:{number}: {line.strip()}"
        for path in published_files()
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if FORBIDDEN[what].search(line)
    ]
    assert not found, f"{what}:\n" + "\n".join(found)
