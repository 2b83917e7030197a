"""The benchmark of converted models that learn: runs, refuses what is wrong, draws its page."""

import copy
import json

import pytest
import torch

pytest.importorskip("transformers", reason="needs the extra hf")


from benchmarks import common, distillation
from benchmarks.distillation import Plan
from benchmarks.oracle import WrongResult
from benchmarks.pretrained_model import Corpus, Network

pytestmark = pytest.mark.usefixtures("nothing_to_release")

CPU = torch.device("cpu")
FORMS = ["dense", "dense, tuned", "index", "index, ranking", "index, all"]
FORMS += ["max, tuned"]
PLAN = Plan(
    (16,), (16, 32, 32), T=256, train_T=128, windows=2, needles=0, watched=0, steps=2,
    ranking_steps=2, queries=16,
)  # fmt: skip


@pytest.fixture(scope="module")
def model():
    return distillation.network_of(None, CPU, is_quick=True)


def bytes_of(path, count):
    return torch.tensor(list(path.read_bytes()[:count]))[None]


def test_quick_form(tmp_path, capsys):
    path, data = tmp_path / "rows.jsonl", tmp_path / "data"
    data.mkdir()
    for i in range(4):
        (data / f"{i}.c").write_text(f"int a{i} = {i};\n" * 200)
    given = ["--quick", "--device", "cpu", "--out", str(path), "--data", str(data)]
    rows = distillation.main(given)
    assert common.read_rows(path) == json.loads(json.dumps(rows))
    assert [row["form"] for row in rows] == FORMS
    for row in rows:
        assert row["text"] == "C" and row["T"] == 256 and len(row["found"]) == 3
        assert ("seconds" in row) == (row["form"] not in ("dense", "index"))
        assert ("above_tuned" in row) == (row["form"] != "dense")
        assert ("caught" in row) == ("s" in row) == (not row["form"].startswith("dense"))
        assert 0 < row.get("caught", 0.5) < 1 and row["loss"] > 0
    assert rows[0]["above"] == rows[1]["above_tuned"] == 0 and rows[1]["above"] != 0
    assert rows[2]["keys"] == 80 and rows[2]["n"] == 2
    assert len({row["loss"] for row in rows}) == len(rows)
    assert "| converted, untrained | 16 | 1 + 2 + 2 |" in capsys.readouterr().out


def test_training_reads_what_no_evaluation_reads(tmp_path):
    """Windows of 8 tokens read at most 64 characters of each file that they begin with."""
    paths = [tmp_path / f"{name}.txt" for name in "abcd"]
    for path in paths:
        path.write_text(path.stem * 64)
    corpus = Corpus("prose", tuple(paths))
    assert [path.stem for path in corpus.without(8, 2).files] == ["b", "d"]
    coder = Network(torch.nn.Module(), lambda text: list(text.encode()))
    plan = copy.copy(PLAN)
    for name, value in dict(T=8, train_T=16, steps=3).items():
        object.__setattr__(plan, name, value)
    rows = distillation.training_rows([corpus], coder, plan)
    assert rows.shape == (3, 16) and set(rows.flatten().tolist()) == {ord("b")}
    with pytest.raises(ValueError, match="data must hold 16 tokens of prose beside"):
        distillation.training_rows([Corpus("prose", tuple(paths[:1]))], coder, plan)


def test_wrong_conversions_are_not_measured(model, monkeypatch):
    text = bytes_of(common.ROOT / "README.md", 256)
    assert distillation.check(model, 16, text, PLAN) < 1e-4
    right = distillation.converted

    def one_block_less(*args, **settings):
        return right(*args, **settings | dict(num_selected_blocks=2))

    monkeypatch.setattr(distillation, "converted", one_block_less)
    with pytest.raises(WrongResult, match="with every block of 16"):
        distillation.check(model, 16, text, PLAN)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (["--s", "48"], "s must divide"),
        (["--length", "1024"], "T must be at least 2176, got 1024"),
        (["--train-length", "1024"], "train-T must be at least 1216, got 1024"),
        (["--steps", "0"], "steps must be at least 1, got 0"),
        (["--needles", "-1"], "needles must be at least 0, got -1"),
    ],
)
def test_bad_arguments(given, told):
    with pytest.raises(ValueError, match=told):
        distillation.main([*given, "--device", "cpu"])


def test_table():
    known = {"gpu": "a GPU", "torch": "2", "triton": "3", "commit": "abcdefghij", "text": "C"}
    known |= {"T": 8192, "train_T": 4096, "train_rows": 9, "batch": 1, "steps": 5, "lr": 1e-5}
    known |= {"ranking_steps": 4, "ranking_lr": 1e-3, "windows": 8, "needles": 8}
    known |= {"found": [8, 8, 8], "above_stderr": 0.01, "above_tuned_stderr": 0.02}
    blocks = {"s": 32, "initial": 2, "local": 16, "n": 16, "caught": 0.75}
    rows = [
        known | {"form": "index", "loss": 1.1, "above": 0.1, "above_percent": 10.0} | blocks,
        known | {"form": "dense", "loss": 1.0, "above": 0.0, "above_percent": 0.0},
        known
        | {"form": "index, all", "loss": 0.99, "above": -0.01, "above_percent": -1.0}
        | blocks,
    ]
    rows[0] |= {"above_tuned": 0.1, "above_tuned_percent": 10.0}
    rows[2] |= {"above_tuned": 0.01, "above_tuned_percent": 0.4, "seed": 0, "seconds": 60.0}
    drawn = distillation.table(rows).splitlines()
    assert drawn[4] == "| dense |  | all | 1.0000 |  |  | 8 / 8 / 8 of 8 |  |"
    told = "| converted, untrained | 32 | 2 + 16 + 16 | 1.1000 | +10.00 % ± 1.00 | +10.00 % ± 2.00"
    assert drawn[5] == f"{told} | 8 / 8 / 8 of 8 | 0.75 |"
    assert drawn[6].startswith("| ranking trained, then all | 32 | 2 + 16 + 16 | 0.9900 | -1.00 %")
    failed = distillation.table([rows[1], known | {"form": "index", "failed": "why"} | blocks])
    assert failed.splitlines()[-1] == "* index: why"
