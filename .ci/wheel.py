"""Exits with a message unless a wheel holds the package, its py.typed, and nothing else."""

import sys
import zipfile

(path,) = sys.argv[1:]
package = "native_sparse_attention"
names = zipfile.ZipFile(path).namelist()
others = [name for name in names if not name.startswith((f"{package}/", f"{package}-"))]
if others or f"{package}/py.typed" not in names:
    sys.exit(f"wheel {path}: py.typed is missing, or it holds other files: {others[:5]}")
