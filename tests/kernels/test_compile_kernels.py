"""The kernels compile for a GPU that is not there; `compile_kernels.py` compiles more of them, and
the gate those of another GPU with the oldest Triton."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[1] / "scripts" / "compile_kernels.py"


def compiled_in_gluon() -> bool:
    from native_sparse_attention.kernels.common import launch

    return launch.triton_is_known()


def test_layer_compiles():
    if importlib.util.find_spec("triton") is None:
        pytest.skip("triton is not installed")
    # the interpreter compiles nothing
    environment = {**os.environ, "TRITON_INTERPRET": "0", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, SCRIPT, "90", "small"],
        capture_output=True,
        text=True,
        env=environment,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    for kernel in ("nsa_flash_fwd", "nsa_flash_dq", "nsa_flash_dkv", "nsa_topk_logits",
                   "nsa_selected_fwd_key_major", "nsa_selected_bwd_key_major",
                   "nsa_rotary"):  # fmt: skip
        assert f".{kernel} " in done.stdout
    if compiled_in_gluon():
        for kernel in ("flash_fwd", "flash_dq", "flash_dkv", "selected_bwd_key_major",
                       "selected_fwd_union"):  # fmt: skip
            assert f".nsa_{kernel}_sm90 " in done.stdout
