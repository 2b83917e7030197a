"""One text of a tree of sources, with held-out text at its end: what `learning.py` trains on.

    python -m benchmarks.corpus SOURCE --text linux.txt    SOURCE: a directory, or a tar (.xz, .gz)

The record's text is C and documentation of the Linux kernel, Debian's package linux-source-6.12:

    apt-get install linux-source-6.12          /usr/src/linux-source-6.12.tar.xz, the default SOURCE

* Files: `.c .h .S .rst .txt` of at most 256 KiB. Larger ones are mostly generated tables of
  registers. A file with a byte 0, and a copy of a file that is there already, are left out.
* Order: by directory, then by name, so that files of a directory are together. Each file begins
  with a byte 0, its path and a line break.
* Held-out text: whole groups of directories, which are those with the same first four names of
  their path. Groups are taken by the SHA-256 of these names, first the held-out ones, then those
  to train on, as long as they fit into the size asked for. Two bytes 0 separate the two parts.

The text depends on the names and contents of the files only. Its SHA-256 and sizes are printed,
written to `TEXT.json` and appended to results/corpus.jsonl.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import json
import lzma
import mmap
import os
import tarfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from training.runs import write

from . import common
from .common import Row

PACKAGE = "linux-source-6.12"
SOURCE = Path("/usr/src") / f"{PACKAGE}.tar.xz"
KINDS = (".c", ".h", ".S", ".rst", ".txt")
# names of a path that make a group
DEPTH = 4
FILE, HELD_OUT = b"\0", b"\0\0"
# of a text without held-out text
HELD_OUT_SHARE = 0.05
KEYS = ("train", "held_out")


@dataclass(frozen=True)
class Sizes:
    """Bytes asked for: of the whole text, of its held-out part, of the largest file."""

    whole: int = 290_000_000
    held_out: int = 8_000_000
    file: int = 256 * 1024

    def __post_init__(self) -> None:
        common.check_least(self, dict(whole=self.held_out + 1, held_out=1, file=1))


# files of a source: path, size, and what reads it

Files = Iterator[tuple[str, int, Callable[[], bytes]]]


def files_of(source: Path) -> Files:
    """Raises ValueError: `source` is not there, or is neither a directory nor an archive."""
    if source.is_dir():
        for path in source.rglob("*"):
            if path.is_file() and not path.is_symlink():
                yield path.relative_to(source).as_posix(), path.stat().st_size, path.read_bytes
        return
    try:
        with tarfile.open(source, "r|*") as archive:  # read from its begin to its end
            for member in archive:
                if member.isfile() and (file := archive.extractfile(member)) is not None:
                    name = os.path.normpath(member.name).replace(os.sep, "/")
                    yield name, member.size, functools.partial(file.read, -1)
    except (OSError, tarfile.TarError, lzma.LZMAError, zlib.error, EOFError) as error:
        raise ValueError(
            f"source must be a directory or a tar archive, such as {SOURCE} of Debian's package "
            f"{PACKAGE}, got {source}: {error}"
        ) from None


def is_wanted(path: str, size: int, sizes: Sizes) -> bool:
    return path.endswith(KINDS) and size <= sizes.file


# which of them


def group_of(path: str) -> str:
    return "/".join(path.split("/")[:-1][:DEPTH])


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
        groups[group_of(path)] = groups.get(group_of(path), 0) + size + len(encoded(path)) + 2
    # many groups, so that the held-out text is like the rest
    held_out = taken(groups, sizes.held_out, max(1, sizes.held_out // 8))
    rest = {name: size for name, size in groups.items() if name not in held_out}
    left = sizes.whole - sum(groups[name] for name in held_out)
    return taken(rest, left, left), held_out


def common_root(paths: Iterable[str]) -> str:
    """The first name of all paths with the slash behind it, "" if they have several."""
    roots = {path.partition("/")[0] if "/" in path else "" for path in paths}
    root = roots.pop() if len(roots) == 1 else ""
    return f"{root}/" if root else ""


# the text


def build(source: Path, out: Path, sizes: Sizes) -> Row:
    """Write the text of a source to `out`, and what is in it to `out`.json. Raises ValueError: a
    source that cannot be read or has too little text."""
    listed = {path: size for path, size, _ in files_of(source) if is_wanted(path, size, sizes)}
    root = "" if source.is_dir() else common_root(listed)
    by_name = {path.removeprefix(root): size for path, size in listed.items()}
    training, held_out = chosen(by_name, sizes)
    if not training or not held_out:
        raise ValueError(
            f"source {source} has {len(listed)} files of {', '.join(KINDS)} in directories that "
            f"make no training text and held-out text of {sizes.held_out} bytes"
        )
    contents: dict[str, bytes] = {}
    for path, size, read in files_of(source):
        name = path.removeprefix(root)
        if is_wanted(path, size, sizes) and (group_of(name) in training | held_out):
            contents[name] = read()
    parts, seen = [], set[bytes]()
    for groups in (training, held_out):
        names = [name for name in contents if group_of(name) in groups]
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
        "source": source.name,
        "source_sha256": about(source)["sha256"] if source.is_file() else None,
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
    add("source", type=Path, nargs="?", default=SOURCE, help="a directory or a tar archive")
    add("--text", type=Path, required=True, help="the text; TEXT.json says what is in it")
    add("--bytes", type=int, default=sizes.whole, help="of the text, at most")
    add("--held-out-bytes", type=int, default=sizes.held_out, help="of these, at most")
    add("--file-bytes", type=int, default=sizes.file, help="of a file, at most")


def run(args: argparse.Namespace, recorder: common.Recorder) -> None:
    sizes = Sizes(args.bytes, args.held_out_bytes, args.file_bytes)
    row = build(args.source, args.text, sizes)
    recorder.add({name: value for name, value in row.items() if name != "held_out_groups"})


BENCHMARK = common.Benchmark("corpus", __doc__, options, run, ("source", "bytes", "sha256"))
main = BENCHMARK.main

if __name__ == "__main__":
    main()
