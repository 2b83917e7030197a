"""What the site needs besides mkdocs' plugins: pages of files outside docs/, links between files as
GitHub follows them, and formulas as MathML, which browsers draw without a script."""

from __future__ import annotations

import html
import posixpath
import re
from pathlib import Path

from latex2mathml.converter import convert
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parent.parent

# pages of files outside docs/
PAGES = {
    "index.md": "README.md",
    "contributing.md": "CONTRIBUTING.md",
    "changelog.md": "CHANGELOG.md",
    "data.md": "data/README.md",
    "results/performance.md": "benchmarks/results/performance.md",
    "results/training.md": "benchmarks/results/training.md",
    "results/generation.md": "benchmarks/results/generation.md",
}
# programs, shown as pages
PROGRAMS = {f"examples/{path.stem}.md": path for path in (ROOT / "examples").glob("*.py")}
# files that pages link to, as they are
ASSETS = ("LICENSE", "CITATION.cff")
SITE_PATHS = {source: page for page, source in PAGES.items()}
SITE_PATHS |= {path.relative_to(ROOT).as_posix(): page for page, path in PROGRAMS.items()}


def on_files(files, config):
    for page, source in PAGES.items():
        files.append(File.generated(config, page, abs_src_path=str(ROOT / source)))
    for page, path in PROGRAMS.items():
        text = f"# {path.name}\n\n```python\n{path.read_text(encoding='utf-8')}```\n"
        files.append(File.generated(config, page, content=text))
    for asset in ASSETS:
        files.append(File.generated(config, asset, abs_src_path=str(ROOT / asset)))
    return files


def moved(link: str, page: str) -> str:
    """A link of the repository as a link of the site."""
    target, hash, anchor = link.partition("#")
    if not target or re.match(r"[a-z]+:", target):
        return link
    source = PAGES.get(page, f"docs/{page}")
    path = posixpath.normpath(posixpath.join(posixpath.dirname(source), target))
    path = SITE_PATHS.get(path, path.removeprefix("docs/"))
    return posixpath.relpath(path, posixpath.dirname(page) or ".") + hash + anchor


def on_page_markdown(markdown, page, config, files):
    def link(found: re.Match[str]) -> str:
        return found[1] + moved(found[2], page.file.src_uri) + found[3]

    parts = re.split(r"(^```.*?^```$)", markdown, flags=re.DOTALL | re.MULTILINE)
    for k in range(0, len(parts), 2):  # not inside code
        parts[k] = re.sub(r"(\]\()([^)\s]+)(\))", link, parts[k])
        parts[k] = re.sub(r'(<img src=")([^"]+)(")', link, parts[k])
        # GitHub reads Markdown inside <details> by itself
        parts[k] = parts[k].replace("<details>", '<details markdown="1">')
    return "".join(parts)


def mathml(latex: str, display: str) -> str:
    # the converter has no \big\{ and no \|, and sizes brackets by \left and \right
    latex = re.sub(r"\\[bB]ig(?=[(\[])", r"\\left", latex)
    latex = re.sub(r"\\[bB]ig(?=[)\]])", r"\\right", latex)
    latex = re.sub(r"\\[bB]ig(?=[|\\])", "", latex).replace(r"\|", r"\Vert ")
    result = convert(latex, display=display)
    if "\\" in result:
        raise PluginError(f"a command is left in the formula {latex!r}: {result}")
    return result


def on_page_content(html_text, page, config, files):
    def formula(found: re.Match[str]) -> str:
        display = "block" if found["open"] == r"\[" else "inline"
        return mathml(html.unescape(found["latex"]), display)

    return re.sub(
        r'<(?P<tag>span|div) class="arithmatex">(?P<open>\\[(\[])(?P<latex>.*?)\\[)\]]</(?P=tag)>',
        formula,
        html_text,
        flags=re.DOTALL,
    )
