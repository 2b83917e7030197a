"""What a release promises: one version everywhere, a reference that has every public name, and the
messages that docs/troubleshooting.md shows."""

import importlib.util
import re
import runpy
import sys
import zipfile
from pathlib import Path
from types import ModuleType

import pytest

import native_sparse_attention
from native_sparse_attention import masks, recipes, view

ROOT = Path(__file__).resolve().parent.parent


def read(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def own_names(module: ModuleType) -> list[str]:
    """The public functions and classes that a module defines."""
    members = {n: x for n, x in vars(module).items() if not n.startswith("_")}
    return [n for n, x in members.items() if getattr(x, "__module__", "") == module.__name__]


def test_one_version_everywhere():
    (version,) = re.findall(r'^version = "(.+)"$', read("pyproject.toml"), re.MULTILINE)
    assert re.findall(r"^version: (.+)$", read("CITATION.cff"), re.MULTILINE) == [version]
    released = re.findall(r"^## \[(\d.*?)\]", read("CHANGELOG.md"), re.MULTILINE)
    to_come = re.findall(r"^To be released as (\S+?),", read("CHANGELOG.md"), re.MULTILINE)
    assert version in (*to_come, *released[:1])
    if native_sparse_attention.__version__ != "0+unknown":
        assert native_sparse_attention.__version__ == version, "install the package again"


def test_reference_has_every_public_name():
    found = []
    for page in (ROOT / "docs" / "api").glob("*.md"):
        found += re.findall(r"^::: (\S+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    package = "native_sparse_attention"
    public = {f"{package}.{name}" for name in native_sparse_attention.__all__}
    public -= {f"{package}.recipes"}  # a module, whose functions stand there
    public |= {f"{package}.recipes.{name}" for name in own_names(recipes)}
    public |= {f"{package}.view.{name}" for name in {*view.__all__} - {"collect"}}
    public |= {f"{package}.masks.{name}" for name in masks.__all__}
    names = read("native_sparse_attention/hf/__init__.py").rpartition("__all__ = ")[2]
    public |= {f"{package}.hf.{name}" for name in re.findall(r'"(\w+)"', names)}
    assert public <= set(found), sorted(public - set(found))
    assert len(found) == len(set(found)), "a name stands on two pages"
    (nav,) = re.findall(r"^nav:\n(.*?)^\S", read("mkdocs.yml"), re.DOTALL | re.MULTILINE)
    pages = {path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")}
    assert pages <= set(re.findall(r"(\S+\.md)$", nav, re.MULTILINE)), "a page is not in the menu"


def test_commands_name_programs_that_exist():
    """Of the Makefile and the pages: `python -m NAME`, where NAME may have a loop's variable."""
    pages = [ROOT / "Makefile", ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    text = "\n".join(page.read_text(encoding="utf-8") for page in pages)
    own = r"-m ((?:benchmarks|training|native_sparse_attention)\b[\w.]*)(\$\$name)?"
    looped = re.findall(r"^(?:DIRECT|BY_HAND) = (.*)$", text, re.MULTILINE)
    names = {name for name, variable in re.findall(own, text) if not variable}
    names |= {f"benchmarks.{name}" for line in looped for name in line.split()}
    for name in names:
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.submodule_search_locations:
            spec = importlib.util.find_spec(f"{name}.__main__")
        assert spec, f"python -m {name}"


def test_wheel_check_refuses_other_files(tmp_path, monkeypatch):
    """`.ci/wheel.py`, which runs on each wheel that is built."""

    def check(*names: str) -> None:
        wheel = tmp_path / "a.whl"
        with zipfile.ZipFile(wheel, "w") as archive:
            for name in names:
                archive.writestr(name, "")
        monkeypatch.setattr(sys, "argv", ["wheel.py", str(wheel)])
        runpy.run_path(str(ROOT / ".ci" / "wheel.py"), run_name="__main__")

    good = ("native_sparse_attention/__init__.py", "native_sparse_attention/py.typed")
    check(*good, "native_sparse_attention-0.1.0.dist-info/METADATA")
    for bad in (good[:1], (*good, "tests/test_cost.py"), (*good, "benchmarks/__init__.py")):
        with pytest.raises(SystemExit, match="wheel"):
            check(*bad)


PAGE = "docs/troubleshooting.md"
TEXT = read(PAGE)
BEGIN = re.search(r"^```python\n(.*?)^```$", TEXT, re.DOTALL | re.MULTILINE)[1]
MISTAKES = re.findall(
    r"^### ([^\n]+)\n\n```py\n(.*?)^```\n\n```text\n(.*?)^```$", TEXT, re.DOTALL | re.MULTILINE
)


def test_every_mistake_has_a_message():
    assert len(MISTAKES) == TEXT.count("\n```py\n") == TEXT.count("\n```text\n") >= 9


@pytest.mark.parametrize(
    "code, message", [pytest.param(*rest, id=title) for title, *rest in MISTAKES]
)
def test_gives_the_message(code, message, monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)  # by which kernels run on a CPU
    scope: dict[str, object] = {}
    exec(compile(BEGIN, PAGE, "exec"), scope)
    with pytest.raises((ValueError, NotImplementedError)) as raised:
        exec(compile(code, PAGE, "exec"), scope)
    found = f"{type(raised.value).__name__}: {raised.value}"
    assert found.split() == message.split()  # the page wraps lines
