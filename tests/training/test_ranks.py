"""train_enwik8.py in several processes, started by torchrun."""

import re
from argparse import Namespace

import pytest

from tests.helpers.processes import torchrun
from tests.training.test_train_enwik8 import ROOT, TINY, finished, in_process, metrics, refused
from training import ranks
from training.errors import UserError

pytestmark = pytest.mark.usefixtures("without_plots")
PLAN = [
    *TINY, *("--heads", 4, "--kv-heads", 2, "--batch-size", 4, "--warmup", 10),
    *("--eval-every", 3, "--save-every", 3, "--sample-every", 0),
]  # fmt: skip


def run_failing(processes, *args, **how):
    script = ROOT / "tests/scripts/failing_run.py"
    return torchrun(processes, script, *args, imports=["train_enwik8"], **how)


def check_metrics(run, alone):
    """They are those of one process."""
    for one, many in zip(metrics(alone), metrics(run), strict=True):
        for name in one.keys() & {"step", "loss", "grad_norm", "val_bpb", "test_bpb"}:
            assert many[name] == pytest.approx(one[name], rel=1e-4), (one["step"], name)


def test_a_rank_that_hangs(text, tmp_path):
    """The others end after --timeout. One process goes on, and all have learnt as one does, from
    packed documents too."""
    mesh = ["--cp", 2, "--tp", 2, "--timeout", 6]
    plan = ["--data", text, *PLAN, "--steps", 6, "--pack", 7]
    done = run_failing(4, "hang", *plan, *mesh, "--name", "run", cwd=tmp_path)
    assert done.returncode != 0
    assert re.search(r"rank [023] failed at step 5: RuntimeError: .*Timed out wait", done.stderr)
    assert "rank 1 failed" not in done.stderr
    assert done.stdout.count("parameters, sparse attention on cpu") == 1
    run = tmp_path / "runs/run"
    assert not list(run.glob("*.tmp")) and not (run / "step-00000006.json").exists()
    finished(in_process(tmp_path, "--resume", run))
    finished(in_process(tmp_path, *plan, "--name", "one"))
    check_metrics(run, tmp_path / "runs/one")


def test_torchrun_restarts(text, tmp_path):
    """Processes that refuse their options have begun no run, and do not go on with an older one.
    Later ones go on with theirs."""
    plan = ["--data", text, *PLAN, "--steps", 6, "--attention", "auto"]
    finished(in_process(tmp_path, *plan, "--name", "older"))
    done = finished(run_failing(2, "data,kill", *plan, cwd=tmp_path, restarts=2))
    assert "--data is {'bytes': " in done.stderr
    assert re.findall(r": step (\d) of 6", done.stdout) == ["0", "3"]
    check_metrics(tmp_path / "runs/squares-sparse-1", tmp_path / "runs/older")


def test_what_is_refused(tmp_path, monkeypatch):
    def message(*args):
        return refused(in_process(tmp_path, "--data", "auto", *args))

    assert "--dp 2 x --cp 1 x --tp 1 is not the number of processes, 1" in message("--dp", 2)
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    assert "mpirun are not supported" in message()
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert "--view needs one process, got 2" in message("--view")
    assert "the environment has WORLD_SIZE=2 without RANK" in message()
    sizes = dict(compress_block_size=15, compress_block_sliding_stride=4, selection_stride=1)
    sizes |= dict(seq_len=36, attention="sparse", pack="")
    for words, mesh, changes in (
        ("--attention dense needs one process, got 2", dict(dp=2), dict(attention="dense")),
        ("--batch-size 3 must be a multiple of --dp 2", dict(dp=2), dict(batch_size=3)),
        ("--seq-len 36 must be a multiple of 16 with --cp 2", dict(cp=2), dict(pack="<")),
        ("--seq-len 32 must be a multiple of 16 with .* at least 48", dict(cp=2), dict(seq_len=32)),
    ):
        cfg = Namespace(**dict(batch_size=2) | sizes | changes)
        with pytest.raises(UserError, match=words):
            ranks.parallel(None, Namespace(**mesh), cfg)
    monkeypatch.setattr(ranks, "is_parallel", lambda: True)
    monkeypatch.setattr(ranks.dist, "get_world_size", lambda: 2)
    gather = lambda settings, own: settings.__setitem__(slice(2), [own, own | {"lr": 0.5}])  # noqa: E731
    monkeypatch.setattr(ranks.dist, "all_gather_object", gather)
    with pytest.raises(UserError, match="--lr is 0.5 in rank 1 and 0.002 in rank 0: start all"):
        ranks.check_same(Namespace(), Namespace(lr=0.002))
    assert not list(tmp_path.iterdir())
