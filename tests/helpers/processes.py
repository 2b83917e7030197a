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


def torchrun(processes, script, *args, imports=(), restarts=0, **how):
    """Real torchrun, whose processes are forks of one that has imported what takes seconds."""
    if not torch.distributed.is_available():
        pytest.skip("this torch has no torch.distributed")
    modules = ", ".join(("torch._dynamo", "native_sparse_attention.distributed", *imports))
    command = ["-c", f"import {modules}; from torch.distributed import run; run.main()"]
    command += ["--standalone", f"--nproc-per-node={processes}", f"--max-restarts={restarts}"]
    command += ["--monitor-interval=0.05", "--start-method=fork", "--run-path", script, *args]
    return python(*command, timeout=240, OMP_NUM_THREADS="1", **how)


def printed(done):
    """What a process printed, which succeeded."""
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout
