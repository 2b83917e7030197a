"""A forward and a backward pass take at most 1.5 times the memory of dense attention: as
`peak_memory.py` counts it, and as the benchmark's rows of dense attention have it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

from benchmarks import common
from benchmarks.performance import MOST_MEMORY, Rows
from native_sparse_attention.kernels.common import sm90

SCRIPT = Path(__file__).parent / "scripts" / "peak_memory.py"
LENGTHS = (1024, 4096, 8192, 65536)
CASES = [
    f"{T}:{heads}:{stride}"
    for heads in ("64/4", "32/8", "32/32")
    for T in LENGTHS
    for stride in (1, 4, 16)
]


@pytest.fixture(scope="module")
def peaks():
    """MiB of each case."""
    if not sm90.triton_is_known():
        pytest.skip("this Triton has no kernels for a Hopper of its own")
    environment = {**os.environ, "TRITON_INTERPRET": "0", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, SCRIPT, *CASES], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return dict(json.loads(line) for line in done.stdout.splitlines() if line.startswith("["))


@pytest.fixture(scope="module")
def dense():
    rows = Rows(common.read_rows(common.RESULTS / "attention.jsonl"))

    def peak(T, H, K):
        return rows.pair(((H, K), "dense-cudnn", "whole", 1, None), T, "peak_mib")[0]

    return peak


@pytest.mark.slow(one_of=4)
@pytest.mark.parametrize("case", CASES)
def test_peak(peaks, dense, case):
    T, heads, _ = case.split(":")
    of_dense = dense(int(T), *map(int, heads.split("/")))
    assert 0.5 * of_dense < peaks[case] <= MOST_MEMORY * of_dense
