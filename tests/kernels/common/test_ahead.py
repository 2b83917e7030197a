"""Launchers that threads load: each thread gets its own, though Python has one module for all."""

import shutil
import subprocess
import sys
import sysconfig
import threading
from pathlib import Path

import pytest

pytest.importorskip("triton")

from native_sparse_attention.kernels.common import ahead

SOURCE = """
#include <Python.h>
static PyObject *launch(PyObject *self, PyObject *args) { return PyLong_FromLong(NUMBER); }
static PyMethodDef methods[] = {{"launch", launch, METH_NOARGS, ""}, {NULL, NULL, 0, NULL}};
static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "launcher", NULL, -1, methods};
PyMODINIT_FUNC PyInit_launcher(void) { return PyModule_Create(&module); }
"""


@pytest.fixture
def launchers(tmp_path):
    """Two files of one module name, whose functions return 0 and 1."""
    compiler, include = shutil.which("gcc"), sysconfig.get_path("include")
    if compiler is None or not (Path(include) / "Python.h").exists():
        pytest.skip("needs a C compiler and Python's headers")
    paths = []
    for number in range(2):
        (tmp_path / f"{number}.c").write_text(SOURCE.replace("NUMBER", str(number)))
        paths.append(tmp_path / str(number) / "launcher.so")
        paths[-1].parent.mkdir()
        command = [compiler, "-shared", "-fPIC", f"-I{include}", tmp_path / f"{number}.c"]
        subprocess.run([*command, "-o", paths[-1]], check=True, capture_output=True)
    return [str(path) for path in paths]


@pytest.mark.skipif(ahead.AsyncCompileMode is None, reason="needs Triton 3.6")
def test_threads_load_their_own_launchers(launchers):
    wrong, interval = [], sys.getswitchinterval()

    def load_often(number):
        for _ in range(1000):
            module = ahead.build._load_module_from_path("launcher", launchers[number])
            if module.launch() != number:
                wrong.append(number)

    before = ahead.build._load_module_from_path
    sys.setswitchinterval(1e-6)
    try:
        with ahead.own_launchers():
            threads = [threading.Thread(target=load_often, args=(n,)) for n in range(2)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
    finally:
        sys.setswitchinterval(interval)
        sys.modules.pop("launcher", None)
    assert wrong == [] and ahead.build._load_module_from_path is before
