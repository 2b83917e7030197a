"""The benchmark of training: its oracle, its rows, its table."""

import importlib.util

import pytest
import torch

from benchmarks import common, training


def row(provider, T, **fields):
    where = dict(gpu="a GPU", torch="2", triton="3", commit="abc")
    return {"provider": provider, "T": T, **where, **fields}


def test_table():
    rows = [
        row("ours", 512, tokens_per_s=1_234_567, peak_mib=2048),
        row("peer", 512, failed="out of memory"),
        row("ours", 1024, tokens_per_s=1, peak_mib=1),
        row("ours", 512, tokens_per_s=2_000_000, peak_mib=1024),
        row("graph", 512, tokens_per_s=3_000_000, peak_mib=1024, reserved_mib=4096),
    ]
    text = training.table(rows)
    assert "| ours | 2000 (1.0) | 0 (0.0) |" in text and "| peer | out of memory |  |" in text
    assert "| graph | 3000 (4.0) |  |" in text


def test_quick(tmp_path):
    out = tmp_path / "rows.jsonl"
    (row,) = training.main(["--quick", "--providers", "ours", "--device", "cpu", "--out", str(out)])
    assert row["tokens_per_s"] > 0 and common.read_rows(out)[0]["T"] == 128


def test_wrong_gradients_are_not_timed(monkeypatch):
    class Wrong(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, d):
            return 1.2 * d

    net = training.ours(training.QUICK)
    ids = torch.randint(0, 256, (1, 33))
    right = lambda x: net(x, return_loss=True)  # noqa: E731
    training.check("ours", net, training.QUICK, right, ids, 2.0)
    with pytest.raises(training.WrongResult, match="gradients"):
        wrong = lambda x: Wrong.apply(right(x))  # noqa: E731
        training.check("ours", net, training.QUICK, wrong, ids, 2.0)


def test_published_has_our_weights_and_gradients():
    """In float32, without kernels of its own."""
    if importlib.util.find_spec("native_sparse_attention_pytorch") is None:
        pytest.skip("native-sparse-attention-pytorch is not installed")
    torch.manual_seed(0)
    theirs, own = (make(training.QUICK) for make in (training.published, training.ours))
    own.load_state_dict(theirs.state_dict())
    if torch.cuda.is_available():
        return  # there it takes its kernels
    ids = [torch.randint(0, training.QUICK["num_tokens"], (2, 129))]
    (loss, grads), (own_loss, own_grads) = (
        training.results(net, lambda x, net=net: net(x, return_loss=True), ids, low=False)
        for net in (theirs, own)
    )
    assert abs(loss - own_loss) <= 1e-6 * own_loss
    assert (grads - own_grads).norm() <= 1e-5 * own_grads.norm()
