"""The version that an installed package tells, and sources that are not installed."""

import subprocess
import sys
from importlib import metadata
from pathlib import Path

import native_sparse_attention

ROOT = Path(__file__).resolve().parent.parent


def test_is_that_of_the_distribution():
    try:
        expected = metadata.version("native-sparse-attention")
    except metadata.PackageNotFoundError:
        expected = "0+unknown"
    assert native_sparse_attention.__version__ == expected


def test_sources_on_the_path_have_one_too():
    code = """
from importlib import metadata

def missing(name):
    raise metadata.PackageNotFoundError(name)

metadata.version = missing
import native_sparse_attention
assert native_sparse_attention.__version__ == "0+unknown"
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
