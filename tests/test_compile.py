"""The kernels compile for GPUs that are not there; `compile_kernels.py` compiles more of them."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("compile_kernels.py")


def compiled_in_gluon() -> bool:
    from native_sparse_attention.kernels.hopper import gpu

    return gpu.triton_is_known()


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
    for kernel in ("interval.forward", "interval_backward.dq", "interval_backward.dkv",
                   "ranking.scoring.logits", "listed.pairs.forward", "listed.pairs.backward",
                   "gates.dq", "gates.dk", "rotary.rotate"):  # fmt: skip
        assert f"kernels.{kernel}_kernel" in done.stdout
    if capability == 90 and compiled_in_gluon():
        for kernel in ("interval_forward.forward", "interval_dq.dq", "interval_dkv.dkv",
                       "listed_forward.forward", "listed_backward.backward",
                       "shared_blocks.forward", "probs_ranking.ranking",
                       "gather_forward.forward", "gather_dq.dq"):  # fmt: skip
            assert f"kernels.hopper.{kernel}_kernel" in done.stdout
