"""What the site needs besides mkdocs' plugins: pages of files outside docs/, links between files as
GitHub follows them, and formulas as MathML, which browsers draw without a script."""

from __future__ import annotations

import functools
import html
import posixpath
import re
from pathlib import Path

from latex2mathml.converter import convert
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File
from pymdownx.slugs import slugify

ROOT = Path(__file__).resolve().parent.parent

# pages of files outside docs/; "README.md" is cut in two at its headings of second level
README = {
    "index.md": ("", "Which form", "How fast it is", "When not to use it"),
    "model.md": (
        "In your own model",
        "Arguments of `SparseAttention`",
        "What else is in the package",
    ),
}
PAGES = {
    "contributing.md": "CONTRIBUTING.md",
    "changelog.md": "CHANGELOG.md",
    "data.md": "data/README.md",
}
# programs, shown as pages
PROGRAMS = {f"examples/{path.stem}.md": path for path in (ROOT / "examples").glob("*.py")}
# files that pages link to, as they are
ASSETS = ("LICENSE", "CITATION.cff")
SITE_PATHS = {source: page for page, source in PAGES.items()}
SITE_PATHS |= {path.relative_to(ROOT).as_posix(): page for page, path in PROGRAMS.items()}
SOURCES = PAGES | dict.fromkeys(README, "README.md")
anchor_of = functools.partial(slugify(case="lower"), sep="-")


def sections(text: str, names: tuple[str, ...]) -> str:
    """The named sections of a page, each with its heading; "" is the part before the first."""
    parts = re.split(r"^(?=## )", text, flags=re.MULTILINE)
    by_name = {"": parts[0]}
    by_name |= {part.splitlines()[0].removeprefix("## "): part for part in parts[1:]}
    return "".join(by_name[name] for name in names)


def on_files(files, config):
    for page, names in README.items():
        text = sections((ROOT / "README.md").read_text(encoding="utf-8"), names)
        if "" not in names:  # the first section's name is the page's
            text = text.removeprefix("#")
        files.append(File.generated(config, page, content=text))
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
    source = SOURCES.get(page, f"docs/{page}")
    path = posixpath.normpath(posixpath.join(posixpath.dirname(source), target))
    if path == "README.md":  # the half that has this heading
        halves = [half for half, names in README.items() if anchor in map(anchor_of, names)]
        path = halves[0] if anchor else "index.md"
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
