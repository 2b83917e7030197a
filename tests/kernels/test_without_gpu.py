"""On a GPU that is not there the kernels compile, and a forward and a backward pass take at most
1.5 times the memory of dense attention: as `peak_memory.py` counts it, and as the benchmark's rows
of dense attention have it. `compile_kernels.py` compiles more kernels, and the gate those of
another GPU with the oldest Triton."""

import json
from pathlib import Path

import pytest

from benchmarks import common
from native_sparse_attention.kernels.common import launch
from tests.helpers.processes import printed, python

SCRIPTS = Path(__file__).resolve().parents[1] / "scripts"


def output_of(script, *args):
    # the interpreter compiles nothing
    return printed(python(SCRIPTS / script, *args, TRITON_INTERPRET="0"))


PORTABLE = "flash_fwd flash_dq flash_dkv topk_logits selected_fwd_key_major selected_bwd_key_major"
# the part of `compile_kernels.py`, its kernels, and those for Hopper GPUs
COMPILED = [
    ("small-1", PORTABLE, "flash_fwd flash_dq flash_dkv selected_fwd_union"),
    pytest.param(
        "small-2", "rotary decode_persistent", "selected_bwd_key_major", marks=pytest.mark.slow
    ),
]


@pytest.mark.parametrize("part, kernels, on_hopper", COMPILED)
def test_kernels_compile(part, kernels, on_hopper):
    told = output_of("compile_kernels.py", "90", part)
    for kernel in kernels.split():
        assert f".nsa_{kernel} " in told
    if launch.triton_is_known():
        for kernel in on_hopper.split():
            assert f".nsa_{kernel}_sm90 " in told


SHAPES = [(T, H, K) for H, K in ((64, 4), (32, 8), (32, 32)) for T in (1024, 8192, 65536)]
CASES = [f"{T}:{H}/{K}:{stride}" for T, H, K in SHAPES for stride in (1, 16)]


@pytest.fixture(scope="module")
def peaks(request):
    """MiB of each case that is tested."""
    if not launch.triton_is_known():
        pytest.skip("this Triton has no kernels for a Hopper of its own")
    items = [item for item in request.session.items if item.path == request.path]
    cases = [item.callspec.params["case"] for item in items if item.originalname == "test_peak"]
    told = output_of("peak_memory.py", *cases).splitlines()
    return dict(json.loads(line) for line in told if line.startswith("["))


@pytest.mark.slow(one_of=6)
@pytest.mark.parametrize("case", CASES)
def test_peak(peaks, case):
    rows = common.read_rows(common.RESULTS / "attention.jsonl")
    rows = [row for row in rows if row["provider"] == "dense-cudnn" and "peak_mib" in row]
    dense = {f"{row['T']}:{row['H']}/{row['K']}": row["peak_mib"] for row in rows}
    of_dense = dense[case.rpartition(":")[0]]
    assert 0.5 * of_dense < peaks[case] <= 1.5 * of_dense
