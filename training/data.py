"""The bytes that `train_enwik8.py` learns from: files, a download, the embedded corpus."""

from __future__ import annotations

import gzip
import hashlib
import http.client
import io
import os
import sysconfig
import urllib.request
import zipfile
from argparse import Namespace
from pathlib import Path
from typing import Any

import numpy as np

from .errors import UserError, reason

DATA = Path(__file__).resolve().parent.parent / "data"
URL = "http://mattmahoney.net/dc/enwik8.zip"
ZIP_SHA256 = "547994d9980ebed1288380d652999f38a14fe291a6247c157c3d33d4932534bc"
ENWIK8_SHA256 = "2b49720ec4d78c3c9fabaee6e4179a5e997302b3a70029f30f2d582218c024a8"


def load_data(which: str) -> tuple[str, bytes]:
    """The corpus and its name; `auto` is enwik8 where it is or can be had, else the stdlib."""
    if which == "stdlib":
        return which, stdlib_corpus()
    if which not in ("auto", "enwik8"):
        return which, read_bytes(Path(which))
    try:
        return "enwik8", enwik8()
    except DownloadError as error:
        if which == "enwik8":
            raise UserError(f"{error}; data/README.md says how to place the file by hand") from None
        print(f"{error}; training on the embedded corpus, the standard library's source files")
        return "stdlib", stdlib_corpus()


def enwik8(
    folder: Path = DATA, url: str = URL, zip_sha256: str = ZIP_SHA256, sha256: str = ENWIK8_SHA256
) -> bytes:
    """enwik8 from `folder`, downloaded into it first where it is not there."""
    there = [path for name in ("enwik8.gz", "enwik8.zip") if (path := folder / name).exists()]
    if not there:
        download(url, folder / "enwik8.zip", zip_sha256)
    path = there[0] if there else folder / "enwik8.zip"
    content = read_bytes(path)
    if hashlib.sha256(content).hexdigest() != sha256:
        raise UserError(f"{path} is not enwik8 (wrong SHA-256): remove it, or name it with --data")
    return content


def read_bytes(path: Path) -> bytes:
    """A file of bytes, unpacked if it is called .gz or .zip (then with one file in it)."""
    if path.is_char_device() or path.is_block_device():
        raise UserError(f"{path} is a device, expected a file of bytes")
    kind, content = path.suffix.lower(), path.read_bytes()
    if kind not in (".gz", ".zip"):
        return content
    try:
        if kind == ".gz":
            return gzip.decompress(content)
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            files = [info for info in archive.infolist() if not info.is_dir()]
            if len(files) != 1:
                raise UserError(f"{path} holds {len(files)} files, expected one: unpack it")
            return archive.read(files[0])
    except (UserError, MemoryError):
        raise
    except Exception as error:  # of the libraries that unpack, of any kind
        raise UserError(f"{path} is broken: {reason(error)}") from None


class DownloadError(Exception):
    """The network or the far end failed; the embedded corpus may stand in."""


def download(url: str, path: Path, sha256: str, timeout: float = 5.0) -> None:
    """Fetch `url` to `path`: to `path.part`, verified, renamed; one attempt."""
    from tqdm import tqdm  # of the extra train, which not all that import this module need

    part = path.with_name(path.name + ".part")
    try:
        path.parent.mkdir(exist_ok=True)
        request = urllib.request.Request(url, headers={"User-Agent": "train_enwik8"})
        style: dict[str, Any] = {"unit": "B", "unit_scale": True, "desc": path.name}
        with (
            urllib.request.urlopen(request, timeout=timeout) as response,
            part.open("wb") as file,
            tqdm(total=response.length, **style) as bar,
        ):
            while chunk := response.read1(2**16):
                file.write(chunk)
                bar.update(len(chunk))
        if hashlib.sha256(part.read_bytes()).hexdigest() != sha256:
            raise DownloadError(f"{url} sent other bytes than expected (wrong size or SHA-256)")
        os.replace(part, path)
    except (OSError, http.client.HTTPException) as error:
        raise DownloadError(f"cannot download {url} to {path} ({error})") from None
    finally:
        part.unlink(missing_ok=True)


def stdlib_corpus() -> bytes:
    """The embedded corpus: the source files of this Python's standard library, by sorted path.

    Tests, installed packages and the files that describe this build are left out, so that every
    machine with the same Python release has the same bytes.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    out = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
    files = {
        path.relative_to(root).as_posix(): path
        for path in root.rglob("*.py")
        if not out.intersection(path.relative_to(root).parts)
        and not path.is_symlink()
        and not path.name.startswith(("_sysconfigdata", "sitecustomize", "usercustomize"))
        and "config-" not in path.relative_to(root).parts[0]
    }
    if not files:
        raise UserError(f"no source files of the standard library in {root}; give --data PATH")
    return b"".join(files[name].read_bytes() for name in sorted(files))


def split(corpus: bytes, seq_len: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The first 90 % to train, the next 5 % to validate, the last 5 % to test."""
    data = np.frombuffer(corpus, dtype=np.uint8)
    train, valid, test = np.split(data, [len(data) * 90 // 100, len(data) * 95 // 100])
    if min(len(valid), len(test)) <= seq_len:
        need = 20 * (seq_len + 1)
        raise UserError(f"the data has {len(data):,} bytes; --seq-len {seq_len} needs {need:,}")
    return train, valid, test


def check_data(
    cfg: Namespace, corpus: bytes, config: dict[str, Any], run: Path | None
) -> dict[str, Any]:
    """Size and SHA-256 of the corpus, which must be those in the `config.json` of a resumed run."""
    if encoded(cfg.pack) not in corpus:
        raise UserError(f"--pack {cfg.pack} begins no document: {cfg.data} does not hold it")
    about = {"bytes": len(corpus), "sha256": hashlib.sha256(corpus).hexdigest()}
    if config.get("data", about) != about:
        raise UserError(f"{cfg.data} is not what it was when {run} began (other size or SHA-256)")
    return about


def encoded(text: str) -> bytes:
    """The bytes of an option, bad UTF-8 among them."""
    try:
        return text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        raise UserError(f"{text!a} is no text: it cannot be encoded") from None
