"""The benchmark of a layer's times refuses what is wrong; its dense twin is one."""

import pytest
import torch

from benchmarks import layer
from benchmarks.oracle import WrongResult

pytestmark = pytest.mark.usefixtures("nothing_to_release")

CPU = torch.device("cpu")


class Wrong(layer.DenseAttention):
    def forward(self, x, cache=None):
        out = super().forward(x, cache)
        return out * 1.001 if self.backend == "auto" else out


class WrongDecode(layer.DenseAttention):
    def forward(self, x, cache=None):
        out = super().forward(x, cache)
        return out * 1.001 if cache is not None else out


@pytest.mark.parametrize(("kind", "message"), [(Wrong, "out errs"), (WrongDecode, "decode errs")])
def test_a_wrong_layer_is_not_timed(kind, message, monkeypatch):
    plan, build = layer.tiny(), layer.layer_of

    def layer_of(name, plan, device):
        return kind(plan.dim, 4, 2, 16) if name == "dense" else build(name, plan, device)

    with pytest.raises(WrongResult, match=message):
        layer.check(layer_of("dense", plan, CPU), "dense", plan, CPU)
    monkeypatch.setattr(layer, "layer_of", layer_of)
    with pytest.raises(SystemExit, match="1 cases failed, the first: dense .*wrong: "):
        layer.main(["--quick", "--device", "cpu"])


def test_twin_has_the_projections_and_positions_of_the_layer():
    plan = layer.tiny()
    sparse, dense = (layer.layer_of(name, plan, CPU) for name in ("sparse", "dense"))
    shapes = {name: p.shape for name, p in dense.named_parameters()}
    assert set(shapes) == {"norm.weight", "to_qkv.weight", "combine_heads.weight"}
    assert shapes.items() <= {name: p.shape for name, p in sparse.named_parameters()}.items()


def test_twin_rotates_as_rotary_embedding_torch_does():
    package = pytest.importorskip("rotary_embedding_torch")
    dense, t = layer.layer_of("dense", layer.tiny(), CPU), torch.randn(2, 7, 3, 16)
    expected = package.RotaryEmbedding(16).rotate_queries_or_keys(t.transpose(1, 2), offset=5)
    torch.testing.assert_close(dense.rotate(t, 5), expected.transpose(1, 2), atol=1e-5, rtol=1e-5)


def test_summary_of_a_trace():
    """Kernels on two streams overlap; copies are counted apart; host events are left out."""
    events = [
        {"cat": "kernel", "ts": 0.0, "dur": 10.0},
        {"cat": "kernel", "ts": 5.0, "dur": 10.0},
        {"cat": "kernel", "ts": 6.0, "dur": 1.0},
        {"cat": "gpu_memset", "ts": 20.0, "dur": 2.0},
        {"cat": "cuda_runtime", "ts": 0.0, "dur": 50.0},
        {"ph": "M"},
    ]
    expected = {"gpu_ms": 0.021, "busy_ms": 0.017, "kernels": 3, "copies": 1}
    assert layer.summary(events) == expected
