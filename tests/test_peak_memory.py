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
from native_sparse_attention.kernels.common import launch

SCRIPT = Path(__file__).parent / "scripts" / "peak_memory.py"
MOST_MEMORY = 1.5  # times that of dense attention
LENGTHS = (1024, 8192, 65536)
CASES = [
    f"{T}:{heads}:{stride}"
    for heads in ("64/4", "32/8", "32/32")
    for T in LENGTHS
    for stride in (1, 16)
]


@pytest.fixture(scope="module")
def peaks():
    """MiB of each case."""
    if not launch.triton_is_known():
        pytest.skip("this Triton has no kernels for a Hopper of its own")
    environment = {**os.environ, "TRITON_INTERPRET": "0", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, SCRIPT, *CASES], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return dict(json.loads(line) for line in done.stdout.splitlines() if line.startswith("["))


@pytest.fixture(scope="module")
def dense():
    """MiB of dense attention, by T, H and K."""
    rows = common.read_rows(common.RESULTS / "attention.jsonl")
    rows = [row for row in rows if row["provider"] == "dense-cudnn" and "peak_mib" in row]
    return {(row["T"], row["H"], row["K"]): row["peak_mib"] for row in rows}


@pytest.mark.slow(one_of=4)
@pytest.mark.parametrize("case", CASES)
def test_peak(peaks, dense, case):
    T, heads, _ = case.split(":")
    of_dense = dense[(int(T), *map(int, heads.split("/")))]
    assert 0.5 * of_dense < peaks[case] <= 1.5 * of_dense
