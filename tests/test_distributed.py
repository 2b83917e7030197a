"""Two real processes under torchrun: wrapped in DDP or sharded by FSDP, the layer is itself."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).parent / "scripts" / "distributed_worker.py"


def test_two_processes():
    if not torch.distributed.is_available():
        pytest.skip("this torch has no torch.distributed")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    pipes = dict(capture_output=True, text=True, timeout=240)
    result = subprocess.run([*command, str(SCRIPT)], **pipes, env=environment)
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-4000:]
    for wrapper in ("ddp", "fsdp"):
        assert result.stdout.count(f"{wrapper} equals one process") == 2
    assert result.stdout.count("deferred starts") == 4  # of two networks
    assert result.stdout.count("SparseAttention does not support torch's context_parallel") == 2
