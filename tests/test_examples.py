"""The programs of examples/ run, in miniature."""

import importlib.util
import math
import sys
from importlib import metadata
from pathlib import Path
from types import ModuleType

import pytest
import torch

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"


def example(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_example_has_a_test():
    names = {"gpt", "needle", "classify", "huggingface", "convert", "torchtitan_nsa"}
    assert {path.stem for path in EXAMPLES.glob("*.py")} == names


@pytest.mark.parametrize(
    "name, package, told",
    [
        ("huggingface", "native_sparse_attention.hf", r"-e '.\[hf\]'"),
        ("convert", "native_sparse_attention.hf", r"-e '.\[hf\]'"),
        ("torchtitan_nsa", "torchtitan", "torchtitan"),
    ],
)
def test_what_is_missing_is_named(name, package, told, monkeypatch):
    def without(name):
        raise metadata.PackageNotFoundError(name)

    for module in [m for m in sys.modules if m.startswith(package)]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setattr(metadata, "version", without)
    monkeypatch.setitem(sys.modules, "torchtitan", None)
    with pytest.raises(SystemExit, match=f"pip install {told}"):
        example(name)


@pytest.mark.parametrize(
    "name, message",
    [
        ("empty", "FILE must have more than 512 bytes, got 0"),
        ("short", "FILE must have more than 512 bytes, got 1"),
        ("none", "none: No such file or directory"),
    ],
)
def test_gpt_refuses(name, message, tmp_path, capsys):
    (tmp_path / "empty").touch()
    (tmp_path / "short").write_text("a")
    with pytest.raises(SystemExit) as left:
        example("gpt").main([str(tmp_path / name)])
    assert left.value.code == 2 and message in capsys.readouterr().err


def test_gpt(capsys, tmp_path):
    """It learns, and continues the file that it was given."""
    text = tmp_path / "text.txt"
    text.write_bytes(b"the quick brown fox jumps over the lazy dog. " * 40)
    loss = example("gpt").main([str(text), "--quick"])
    assert loss < math.log(256) - 1  # what a guess costs
    assert "the quick brown fox" in capsys.readouterr().out


def test_gpt_decodes_what_it_computes():
    """Through caches as in one forward."""
    module = example("gpt")
    torch.manual_seed(0)
    model, ids = module.GPT(dim=32, depth=2), torch.randint(256, (1, 40))
    caches = [module.KVCache() for _ in model.blocks]
    with torch.no_grad():
        parts = [model(ids[:, :30], caches), model(ids[:, 30:], caches)]
        torch.testing.assert_close(torch.cat(parts, dim=1), model(ids), atol=1e-4, rtol=1e-4)


def test_needle():
    """A strong needle is found by every rule, a weak one by a look at every token."""
    rates = example("needle").main(["--quick"])
    assert min(rates[2048, 32].values()) == 1
    assert rates[2048, 8]["max of tokens"] == 1
    assert rates[2048, 0]["mean of 32"] < 0.7


def test_classify(capsys):
    right = example("classify").main(["--quick"])
    assert 0.3 < right <= 1  # 30 steps do not learn it
    assert f"right on new strings: {right:.2f}" in capsys.readouterr().out


def test_huggingface(capsys):
    """Blocks that cover the text change nothing, fewer blocks do."""
    pytest.importorskip("transformers", reason="needs the extra hf")
    module = example("huggingface")
    losses = module.main(["--quick"])
    assert abs(losses["sparse"] - losses["dense"]) > 1e-3
    losses = module.main(["--quick", "--blocks", "16"])
    assert losses["sparse"] == pytest.approx(losses["dense"], abs=1e-3)
    assert "nats a token" in capsys.readouterr().out


def test_convert(tmp_path):
    pytest.importorskip("transformers", reason="needs the extra hf")
    losses, rankings = example("convert").main(["--quick", "--save", str(tmp_path)])
    assert losses["dense again"] == pytest.approx(losses["dense"], abs=1e-4)
    assert all(map(math.isfinite, losses.values())) and 0 < max(rankings) < 1
    from native_sparse_attention.hf import load_converted

    assert load_converted(tmp_path).config.nsa_converted["index_heads"] == 1


def test_torchtitan(capsys):
    """Its Llama learns from packed documents."""
    pytest.importorskip("torchtitan", reason="needs pip install torchtitan")
    losses = example("torchtitan_nsa").main(["--steps", "6", "--length", "128"])
    assert losses[-1] < losses[0] - 1 and "step 5: loss" in capsys.readouterr().out
