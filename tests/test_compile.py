"""The kernels compile for GPUs that are not there; `compile_kernels.py` compiles more of them."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("compile_kernels.py")


def compiled_in_gluon() -> bool:
    from native_sparse_attention.kernels.common import sm90

    return sm90.triton_is_known()


@pytest.mark.parametrize("capability", [86, 90])
def test_layer_compiles(capability):
    if importlib.util.find_spec("triton") is None:
        pytest.skip("triton is not installed")
    # the interpreter compiles nothing
    environment = {**os.environ, "TRITON_INTERPRET": "0", "PYTHONPATH": str(SCRIPT.parent.parent)}
    done = subprocess.run(
        [sys.executable, SCRIPT, str(capability), "small"],
        capture_output=True,
        text=True,
        env=environment,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    for kernel in ("flash.fwd.forward", "flash.bwd.dq", "flash.bwd.dkv",
                   "topk.scores.logits", "selected.key_major.forward",
                   "selected.key_major.backward", "topk.gates_bwd.dq", "topk.gates_bwd.dk",
                   "rotary.rotate"):  # fmt: skip
        assert f"kernels.{kernel}_kernel" in done.stdout
    if capability == 90 and compiled_in_gluon():
        for kernel in ("flash.fwd_sm90.forward", "flash.dq_sm90.dq", "flash.dkv_sm90.dkv",
                       "selected.key_major_fwd_sm90.forward",
                       "selected.key_major_bwd_sm90.backward",
                       "selected.union_fwd_sm90.forward", "topk.softmax_mass_sm90.ranking",
                       "selected.query_major_fwd_sm90.forward",
                       "selected.query_major_dq_sm90.dq"):  # fmt: skip
            assert f"kernels.{kernel}_kernel" in done.stdout
