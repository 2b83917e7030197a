"""Processes of Python that tests start, with the path of this one."""

import os
import subprocess
import sys

import pytest
import torch


def python(*args, cwd=None, timeout=None, **variables):
    command = [sys.executable, *map(str, args)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **variables}
    pipes = dict(capture_output=True, text=True)
    return subprocess.run(command, cwd=cwd, timeout=timeout, env=environment, **pipes)


def torchrun(processes, *args, restarts=0, **how):
    if not torch.distributed.is_available():
        pytest.skip("this torch has no torch.distributed")
    command = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    command += [f"--max-restarts={restarts}", *args]
    return python(*command, timeout=240, OMP_NUM_THREADS="1", **how)


def printed(done):
    """What a process printed, which succeeded."""
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout
