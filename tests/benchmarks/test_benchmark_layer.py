"""The benchmark of a layer's times refuses what is wrong; its dense twin is one."""

import pytest
import torch

from benchmarks import layer
from benchmarks.oracle import WrongResult
from benchmarks.twin import DenseAttention

pytestmark = pytest.mark.usefixtures("nothing_to_release")

AT = layer.Sizes(True, torch.device("cpu"))


class Wrong(DenseAttention):
    def forward(self, x, cache=None):
        out = super().forward(x, cache)
        return out * 1.001 if self.backend == "auto" else out


class WrongDecode(DenseAttention):
    def forward(self, x, cache=None):
        out = super().forward(x, cache)
        return out * 1.001 if cache is not None else out


@pytest.mark.parametrize(("kind", "message"), [(Wrong, "out errs"), (WrongDecode, "decode errs")])
def test_a_wrong_layer_is_not_timed(kind, message, monkeypatch):
    def layer_of(at, name, length):
        return kind(AT.dim, AT.heads, AT.kv_heads, AT.width)

    with pytest.raises(WrongResult, match=message):
        layer.check(layer_of(AT, "dense", 0), "dense", AT)
    monkeypatch.setattr(layer, "layer_of", layer_of)
    with pytest.raises(SystemExit, match="1 cases failed, the first: dense .*wrong: "):
        layer.main(["--quick", "--device", "cpu", "--providers", "dense"])


def test_twin_rotates_as_rotary_embedding_torch_does():
    package = pytest.importorskip("rotary_embedding_torch")
    dense, t = layer.layer_of(AT, "dense", 0), torch.randn(2, 7, 3, 16)
    expected = package.RotaryEmbedding(16).rotate_queries_or_keys(t.transpose(1, 2), offset=5)
    torch.testing.assert_close(dense.rotate(t, 5), expected.transpose(1, 2), atol=1e-5, rtol=1e-5)


def test_summary_of_a_trace():
    """Kernels on two streams overlap; host events are left out."""
    events = [
        {"cat": "kernel", "ts": 0.0, "dur": 10.0},
        {"cat": "kernel", "ts": 5.0, "dur": 10.0},
        {"cat": "kernel", "ts": 6.0, "dur": 1.0},
        {"cat": "gpu_memset", "ts": 20.0, "dur": 2.0},
        {"cat": "cuda_runtime", "ts": 0.0, "dur": 50.0},
        {"ph": "M"},
    ]
    assert layer.summary(events) == {"busy_ms": 0.017, "kernels": 3}
