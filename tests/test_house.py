"""The rules of the house that no linter knows: who imports whom, what an import may cost, and that
the documentation runs."""

import ast
import functools
import graphlib
import importlib.metadata
import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.processes import printed, python

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = "native_sparse_attention"

# Folders and the modules beside them, top to bottom: each imports from the rows below its own only.
# Within a folder modules import one another, without cycles.
LEVELS: tuple[tuple[str, ...], ...] = (
    ("view.__main__",),  # a command, which loads models of either kind
    ("hf",),  # transformers
    ("",),  # the package itself: public names only
    ("view", "distributed"),
    ("transformer", "precompile", "cost", "recipes"),
    ("attention",),
    ("generate",),
    ("cache", "ranking"),
    ("compress", "rotary"),
    ("ops", "dense"),
    ("masks", "ops.triton"),
    ("kernels.decode", "ops.chunked"),
    ("ops.reference",),
    ("config", "ops.call"),
    ("block_sizes", "presets", "kernels.selected"),
    ("kernels.flash", "kernels.topk", "kernels"),
    ("kernels.common",),
    ("varlen",),
    ("checks",),
    ("blocks", "compat", "initialization", "uncompiled"),
)

DOCUMENTS = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
SOURCES = sorted((ROOT / PACKAGE).rglob("*.py"))

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


@functools.cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def unit_of(module: str) -> str:
    """The folder of a module, or the module itself where it has a row or is in no folder."""
    is_folder = MODULES[module].name == "__init__.py"
    is_unit = is_folder or "." not in module or any(module in units for units in LEVELS)
    return module if is_unit else module.rpartition(".")[0]


def level_of(unit: str) -> int:
    for level, units in enumerate(LEVELS):
        if unit in units:
            return level
    raise LookupError(f"{unit!r} has no row in LEVELS of tests/test_house.py")


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
    for node in ast.walk(tree_of(MODULES[module])):
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
            place = f"{relative(MODULES[module])}:{node.lineno}"
            is_import = called in ("import_module", "importlib.import_module", "__import__")
            assert not is_import, f"{place}: {called}() hides from this test; use a statement"


def test_imports_point_downward():
    wrong, callers = [], ("block_sizes", "cache.", "kernels", "ops.", "precompile")
    for module in MODULES:
        for line, name in imports_of(module):
            root, _, target = name.partition(".")
            place = f"{relative(MODULES[module])}:{line}: {module or PACKAGE} imports"
            if root == "triton" and not module.startswith("kernels."):
                wrong.append(f"{place} triton; only kernels/ may")
            if root != PACKAGE:
                continue
            unit, other = unit_of(module), unit_of(target)
            if unit != other and level_of(other) <= level_of(unit):
                wrong.append(f"{place} {target or PACKAGE}, which is not below it")
            if target.startswith("kernels") and not module.startswith(callers):
                wrong.append(f"{place} {target}; only {callers} call kernels")
    assert not wrong, "\n".join(wrong)


def test_no_module_imports_itself_by_way_of_others():
    names = {f"{PACKAGE}.{module}" if module else PACKAGE: module for module in MODULES}
    graph = {
        module: {names[name] for _, name in imports_of(module) if name in names}
        for module in MODULES
    }
    graphlib.TopologicalSorter(graph).prepare()  # raises CycleError, which names the cycle


KERNELS = ROOT / PACKAGE / "kernels"


def test_kernels_call_no_builtin_that_older_versions_of_triton_lack():
    """`min` and `max` of numbers known at compile time: Triton 3.4 and 3.5 take them for those of
    tensors. Neither the interpreter nor a later Triton minds."""
    found = []
    for path in KERNELS.rglob("*.py"):
        for function in ast.walk(tree_of(path)):
            if not isinstance(function, ast.FunctionDef):
                continue
            if not any("triton.jit" in ast.unparse(name) for name in function.decorator_list):
                continue
            calls = (node for node in ast.walk(function) if isinstance(node, ast.Call))
            names = {ast.unparse(call.func) for call in calls} & {"min", "max"}
            found += [f"{relative(path)}: {function.name} calls {name}" for name in sorted(names)]
    assert not found, "\n".join(found)


# no sum of floats depends on the order in which programs come: all that reads these integers is how
# many programs have come, and which of them was the last
ATOMICS = {
    ("decode/step.py", 'tl.atomic_add(counter, 1, sem="acq_rel")'),
    ("decode/persistent.py", 'tl.atomic_add(counter, 0, sem="relaxed")'),
    ("decode/step.py", 'tl.atomic_add(counter, 0, sem="acquire")'),
    ("decode/step.py", 'tl.atomic_add(reduce_started, 1, sem="relaxed")'),
}


def test_atomic_operations_are_integers_in_any_order():
    mention = re.compile(r"(?:\w+\.)?atomic_\w*(?:\([^)]*\))?|\b(?:atom|red)\.\w+")
    found = {
        (path.relative_to(KERNELS).as_posix(), text)
        for path in KERNELS.rglob("*.py")
        for text in mention.findall(path.read_text(encoding="utf-8"))
    }
    assert found == ATOMICS


def test_import_needs_no_triton_and_no_gpu():
    """And sources on the path that are not installed have a version too."""
    code = """
import sys
from importlib import metadata

def missing(name):
    raise metadata.PackageNotFoundError(name)

metadata.version = missing
sys.modules["triton"] = None  # from here `import triton` raises ImportError

import native_sparse_attention, torch

assert not torch.cuda.is_initialized(), "the import initialised CUDA"
assert native_sparse_attention.__version__ == "0+unknown"
"""
    printed(python("-c", code, cwd=ROOT, CUDA_VISIBLE_DEVICES=""))


def test_import_is_light():
    """With triton and a GPU at hand it loads no kernel and asks nothing of CUDA, for workers fork
    after the import; no compiler, which takes seconds to load; and it warns of nothing. Warnings
    that dependencies give at their own import are theirs."""
    code = """
import sys, torch

heavy = (
    "torch._dynamo", "torch._inductor", "torch.nn.attention.flex_attention", "sympy", "triton",
    "einx", "torch.distributed.tensor", "torch.fx.experimental.symbolic_shapes", "transformers",
)
by_torch = {name for name in heavy if name in sys.modules}
import einops, rotary_embedding_torch, warnings

def asked(*args, **kwargs):
    raise RuntimeError("CUDA was asked for at import")

for name in ("_lazy_init", "is_available", "device_count", "current_device"):
    setattr(torch.cuda, name, asked)

warnings.simplefilter("error")

import native_sparse_attention, native_sparse_attention.masks, native_sparse_attention.compress

loaded = [name for name in sys.modules if name.startswith("native_sparse_attention.kernels.")]
loaded += [name for name in heavy if name in sys.modules and name not in by_torch]
assert not loaded, f"the import loaded {loaded}"
"""
    printed(python("-c", code, cwd=ROOT))


def python_blocks(document: Path) -> Iterator[tuple[int, str]]:
    """(line of the first statement, code) of each block fenced as python."""
    text = document.read_text(encoding="utf-8")
    for block in re.finditer(r"^```python\n(.*?)^```$", text, re.DOTALL | re.MULTILINE):
        yield text.count("\n", 0, block.start(1)) + 1, block[1]


# of releases of transformers that call it `cache`
@pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated:FutureWarning")
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
    if "transformers" in code or document.name == "huggingface.md":
        pytest.importorskip("transformers", reason="needs the extra hf")
    # newlines in front, so that a traceback names the line of the document
    source = compile("\n" * (line - 1) + code, str(document), "exec")
    exec(source, {"__name__": "__main__"})


@pytest.mark.parametrize(
    "name, folder",
    [("draw_masks", "IMAGES"), pytest.param("draw_gallery", "PICTURES", marks=pytest.mark.slow)],
)
def test_pictures_can_be_drawn(name, folder, tmp_path, monkeypatch):
    """`make docs` works; what the pictures show is what the other tests hold."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "docs" / f"{name}.py")
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    committed = {path.name: path for path in getattr(script, folder).glob("*.png")}
    monkeypatch.setattr(script, folder, tmp_path)
    script.main()
    drawn = {path.name for path in tmp_path.iterdir()}
    assert drawn <= committed.keys(), "a new picture: run `make docs` and commit it"
    if name == "draw_gallery":
        page = (ROOT / "docs" / "masks.md").read_text(encoding="utf-8")
        assert drawn == committed.keys() and all(f"(masks/{name})" in page for name in drawn)
        assert sum(path.stat().st_size for path in committed.values()) < 400_000


def test_nothing_private_is_published():
    """In what a reader of the repository sees, less pictures, other people's data and packages."""
    folders = (PACKAGE, "tests", "docs", "examples", "benchmarks", "training", ".ci", ".github")
    kinds = {".py", ".md", ".toml", ".yml", ".yaml", ".sh", ".js", ".css", ".cff", ""}
    inside = [path for folder in folders for path in (ROOT / folder).rglob("*")]
    found = [
        f"{what}: {relative(path)}:{number}: {line.strip()}"
        for path in sorted([*ROOT.iterdir(), ROOT / "data" / "README.md", *inside])
        if path.is_file() and path.suffix in kinds
        if path.name != ".git" and ".published" not in path.parts
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        for what, pattern in FORBIDDEN.items()
        if pattern.search(line)
    ]
    assert not found, "\n".join(found)
