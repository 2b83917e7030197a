"""One text of many files, with held-out text at its end: what `learning.py` trains on.

    python -m benchmarks.corpus DIRECTORY ... --text TEXT

Three texts, from packages of Debian 12 and of PyPI, each unpacked into a directory of its name:

linux.txt, C and documentation of the Linux kernel, the default kinds:

    apt-get install linux-source-6.12
    tar -xf /usr/src/linux-source-6.12.tar.xz
    python -m benchmarks.corpus linux-source-6.12 --text linux.txt

manuals.txt, English: Webster's dictionary of 1913 and two others, a book of politics, manuals of
programs and languages. Pages of HTML without their markup:

    apt-get download anarchism=15.3-3 aptitude-doc-en=0.8.13-5 cfi-en=3.0-10.2 \\
        csound-doc=1:6.18.0+dfsg0-1 debian-policy=4.6.2.0 debian-reference-en=2.100 \\
        developers-reference=12.18 dict-foldoc=20230119-1 dict-gcide=0.48.5+nmu2 \\
        dict-jargon=4.4.7-3.1 freedombox-doc-en=23.6.2+deb12u2 gimp-help-en=2.10.34-2 \\
        git-doc=1:2.39.5-0+deb12u3 grass-doc=8.2.1-1 libreoffice-help-en-us=4:7.4.7-1+deb12u14 \\
        llvm-16-doc=1:16.0.6-15~deb12u1 maxima-doc=5.46.0-11 mh-book=200605-2.2 \\
        octave-doc=7.3.0-2 perl-doc=5.36.0-7+deb12u4 postgresql-doc-15=15.20-0+deb12u1 \\
        python-django-doc=3:3.2.25-0+deb12u7 python3.11-doc=3.11.2-6+deb12u9 \\
        r-doc-html=4.2.2.20221110-2 racket-doc=8.7+dfsg1-1 sqlite3-doc=3.40.1-2+deb12u2 \\
        swi-prolog-doc=9.0.4+dfsg-2 zsh-doc=5.9-4
    mkdir manuals
    for package in *.deb; do dpkg-deb -x $package manuals/$package; done
    python -m benchmarks.corpus manuals/* --text manuals.txt --depth 0 \\
        --kinds .html .htm .pod .dict

python.txt, Python of packages for mathematics, data, networks and databases, with their tests:

    pip download --no-deps --only-binary :all: --python-version 3.12 \\
        --platform manylinux2014_x86_64 sympy==1.13.3 pandas==2.2.3 pyomo==6.8.2 scipy==1.14.1 \\
        astropy==7.0.0 statsmodels==0.14.4 twisted==24.11.0 scikit-learn==1.5.2 numba==0.60.0 \\
        sqlalchemy==2.0.36 numpy==2.1.3 jax==0.4.36 qiskit==1.3.0 matplotlib==3.9.3 \\
        ansible-core==2.18.1 networkx==3.4.2 biopython==1.84 django==5.1.4
    mkdir python
    for package in *.whl; do unzip -q $package -d python/$package; done
    python -m benchmarks.corpus python/* --text python.txt --kinds .py

* Files: of `--kinds`, at most 256 KiB. Larger ones are mostly generated, as tables of registers, or
  a whole manual on one page; a dictionary is cut into pieces of that size. Files that end in .gz or
  .dz are decompressed. A file with a byte 0, and a copy of a file that is there already, are left
  out.
* Order: by directory, then by name, so that files of a directory are together. Each file begins
  with a byte 0, its path, below the name of its source if there are several, and a line break.
* Held-out text: whole groups of directories, which are those with the same first `--depth` names of
  their path; with 0 each file is a group. Groups are taken by the SHA-256 of these names, first the
  held-out ones, then those to train on, as long as they fit into the size asked for. Two bytes 0
  separate the two parts.

The text depends on the names and contents of the files only. Its SHA-256 and sizes are printed,
written to `TEXT.json` and appended to results/corpus.jsonl.
"""

from __future__ import annotations

import argparse
import functools
import gzip
import hashlib
import html
import json
import mmap
import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from training.runs import write

from . import common
from .common import Row

KINDS = (".c", ".h", ".S", ".rst", ".txt")
COMPRESSED, MARKUP, DICTIONARY = (".gz", ".dz"), (".html", ".htm", ".xhtml"), ".dict"
FILE, HELD_OUT = b"\0", b"\0\0"
# of a text without held-out text
HELD_OUT_SHARE = 0.05
KEYS = ("train", "held_out")


@dataclass(frozen=True)
class Sizes:
    """Bytes asked for: of the whole text, of its held-out part, of the largest file. `depth` names
    of a path make a group."""

    whole: int = 290_000_000
    held_out: int = 8_000_000
    file: int = 256 * 1024
    depth: int = 4

    def __post_init__(self) -> None:
        common.check_least(self, dict(whole=self.held_out + 1, held_out=1, file=1, depth=0))


# files of a source: path, size, and what reads it

Files = Iterator[tuple[str, int, Callable[[], bytes]]]


def texts_of(sources: Sequence[Path], kinds: tuple[str, ...], sizes: Sizes) -> Files:
    """Files of the kinds, decompressed, without markup, dictionaries in pieces of the largest
    size. Names of files of several sources begin with the name of their source."""
    for source in sources:
        above = f"{source.name}/" if len(sources) > 1 else ""
        for file in source.rglob("*"):
            if not file.is_file() or file.is_symlink():
                continue
            path, size = file.relative_to(source).as_posix(), file.stat().st_size
            read: Callable[[], bytes] = file.read_bytes
            suffix = next((end for end in COMPRESSED if path.endswith(end)), "")
            name = path.removesuffix(suffix)
            if not name.endswith(kinds):
                continue
            if suffix or name.endswith(MARKUP):
                content = gzip.decompress(read()) if suffix else read()
                content = without_markup(content) if name.endswith(MARKUP) else content
                size, read = len(content), functools.partial(bytes, content)
            if name.endswith(DICTIONARY):
                for number, first in enumerate(range(0, len(content := read()), sizes.file)):
                    piece = content[first : first + sizes.file]
                    yield f"{above}{name}.{number:04}", len(piece), functools.partial(bytes, piece)
            elif size <= sizes.file:
                yield above + name, size, read


HIDDEN = re.compile(r"<!--.*?-->|<(head|script|style|nav|header|footer)\b.*?</\1>", re.S | re.I)
BREAKS = re.compile(r"<(/?(p|div|tr|h\d|dt|dd|table|ul|ol)|li|br|pre)\b[^>]*>", re.I)


def without_markup(content: bytes) -> bytes:
    """The words of an HTML page, a paragraph after another."""
    text = HIDDEN.sub(" ", content.decode("utf-8", "surrogateescape"))
    text = html.unescape(re.sub(r"<[^>]*>", "", BREAKS.sub("\n", text)))
    text = re.sub(r"[ \t\r]+$|\0", "", text, flags=re.M)
    return encoded(re.sub(r"\n{3,}", "\n\n", text).strip() + "\n")


# which of them


def group_of(path: str, depth: int) -> str:
    """The first `depth` directories of a path; with 0 each file is a group of its own."""
    return "/".join(path.split("/")[:-1][:depth]) if depth else path


def encoded(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")


def taken(groups: dict[str, int], most: int, largest: int) -> set[str]:
    """Groups in the order of their hash, each if it fits into what is left of `most` bytes."""
    found, left = set(), most
    for name in sorted(groups, key=lambda name: hashlib.sha256(encoded(name)).digest()):
        if groups[name] <= min(left, largest):
            found.add(name)
            left -= groups[name]
    return found


def chosen(listed: dict[str, int], sizes: Sizes) -> tuple[set[str], set[str]]:
    """Of files and their sizes: the groups to train on, and the held-out groups."""
    groups: dict[str, int] = {}
    for path, size in listed.items():
        group = group_of(path, sizes.depth)
        groups[group] = groups.get(group, 0) + size + len(encoded(path)) + 2
    # many groups, so that the held-out text is like the rest
    held_out = taken(groups, sizes.held_out, max(1, sizes.held_out // 8))
    rest = {name: size for name, size in groups.items() if name not in held_out}
    left = sizes.whole - sum(groups[name] for name in held_out)
    return taken(rest, left, left), held_out


# the text


def build(sources: Sequence[Path], out: Path, sizes: Sizes, kinds: tuple[str, ...] = KINDS) -> Row:
    """Write the text of sources to `out`, and what is in it to `out`.json. Raises ValueError: a
    source that is no directory, or too little text."""
    for source in sources:
        if not source.is_dir():
            raise ValueError(f"source must be a directory, got {source}; unpack archives")
    listed = {path: size for path, size, _ in texts_of(sources, kinds, sizes)}
    training, held_out = chosen(listed, sizes)
    if not training or not held_out:
        raise ValueError(
            f"sources have {len(listed)} files of {', '.join(kinds)} in directories that make no "
            f"training text and held-out text of {sizes.held_out} bytes"
        )
    contents: dict[str, bytes] = {}
    for name, _, read in texts_of(sources, kinds, sizes):
        if group_of(name, sizes.depth) in training | held_out:
            contents[name] = read()
    parts, seen = [], set[bytes]()
    for groups in (training, held_out):
        names = [name for name in contents if group_of(name, sizes.depth) in groups]
        names.sort(key=lambda name: [encoded(part) for part in os.path.split(name)])
        entries = []
        for name in names:
            same = hashlib.sha256(contents[name]).digest()
            if b"\0" not in contents[name] and same not in seen:
                entries.append(FILE + encoded(name) + b"\n" + contents[name])
                seen.add(same)
        parts.append(entries)
    write(out, HELD_OUT.join(b"".join(entries) for entries in parts))
    row = {
        "source": " ".join(path.name for path in sources),
        "kinds": " ".join(kinds),
        **about(out),
        **{f"{k}_bytes": sum(map(len, part)) for k, part in zip(KEYS, parts, strict=True)},
        **{f"{k}_files": len(part) for k, part in zip(KEYS, parts, strict=True)},
        "sizes": asdict(sizes),
        "held_out_groups": sorted(held_out),
    }
    write(out.with_name(out.name + ".json"), json.dumps(row, indent=2).encode() + b"\n")
    return row


# what others read


def mapped(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """The training bytes and the held-out bytes of a text, memory-mapped. Without a mark of
    held-out text it is the last 5 %."""
    data = np.memmap(path, dtype=np.uint8, mode="r")
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        at = content.find(HELD_OUT)
    if at < 0:
        at = round(len(data) * (1 - HELD_OUT_SHARE))
        return data[:at], data[at:]
    return data[:at], data[at + len(HELD_OUT) :]


def about(path: Path) -> dict[str, Any]:
    """Size and SHA-256 of a file."""
    with path.open("rb") as file:
        digest = hashlib.sha256()
        while chunk := file.read(2**22):
            digest.update(chunk)
    return {"bytes": path.stat().st_size, "sha256": digest.hexdigest()}


def options(parser: argparse.ArgumentParser) -> None:
    add, sizes = parser.add_argument, Sizes()
    add("sources", type=Path, nargs="+", metavar="DIRECTORY")
    add("--text", type=Path, required=True, help="the text; TEXT.json says what is in it")
    add("--bytes", type=int, default=sizes.whole, help="of the text, at most")
    add("--held-out-bytes", type=int, default=sizes.held_out, help="of these, at most")
    add("--file-bytes", type=int, default=sizes.file, help="of a file, at most")
    add("--kinds", nargs="+", default=KINDS, metavar=".KIND", help="ends of the names of files")
    add("--depth", type=int, default=sizes.depth, help="directories that make a group; 0: none")


def run(args: argparse.Namespace, recorder: common.Recorder) -> None:
    sizes = Sizes(args.bytes, args.held_out_bytes, args.file_bytes, args.depth)
    row = build(sorted(args.sources), args.text, sizes, tuple(args.kinds))
    recorder.add({name: value for name, value in row.items() if name != "held_out_groups"})


BENCHMARK = common.Benchmark("corpus", __doc__, options, run, ("source", "bytes", "sha256"))
main = BENCHMARK.main

if __name__ == "__main__":
    main()
