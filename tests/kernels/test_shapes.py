"""The layer in every shape that the reference takes, by the kernels that a GPU has for it: outputs
and all gradients within the budget of its branches, against fp64."""

import pytest
import torch

from benchmarks.problem import pooled
from native_sparse_attention import native_sparse_attention
from tests.helpers import selections
from tests.helpers.budget import CUDA, DEVICE
from tests.helpers.composition import assert_layer_right

pytest.importorskip("triton")

from native_sparse_attention.kernels.common import launch

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not CUDA, reason="needs a CUDA device")]

FORCED = {"num_initial_blocks": 1, "num_local_blocks": 2}
# the kernels in Triton, where a Hopper takes others
IN_TRITON = dict.fromkeys(
    (
        "flash_sm90",
        "key_major_sm90",
        "union_sm90",
        "softmax_mass_sm90",
    ),
    False,
)
bf16, fp16, fp32 = torch.bfloat16, torch.float16, torch.float32


def sizes(l=32, d=16, s=64, n=5, w=127):
    return selections.sizes(l, d, s) | dict(num_selected_blocks=n, sliding_window_size=w)


def draw(H, K, D, E, T, S, d, dtype, causal=True, memory=0):
    """The tensors of a call, whose queries are the last of the tokens."""
    W = S // d if causal else -(-S // d)
    shapes = {
        "q": (2, T, H, D), "k": (2, S, K, D), "v": (2, S, K, E), "ck": (2, W, K, D),
        "cv": (2, W, K, E), "mem_k": (K, memory, D), "mem_v": (K, memory, E),
    }  # fmt: skip
    tensors = {
        name: torch.randn(shape, device=DEVICE).to(dtype)
        for name, shape in shapes.items()
        if memory or not name.startswith("mem")
    }
    return tensors | {"branch_gates": torch.rand(2, T, H, 3, device=DEVICE).to(dtype)}


@pytest.mark.parametrize("dtype", [bf16, fp32], ids=str)
@pytest.mark.parametrize("G", [1, 2, 3, 5, 6, 7, 12, 16, 32, 64])
def test_groups(G, dtype):
    K = 1 if G == 64 else 2
    tensors = draw(G * K, K, 64, 64, 333, 333, 16, dtype, memory=1)
    assert_layer_right(tensors, sizes(), forced=FORCED)


@pytest.mark.parametrize("dtype", [bf16, fp16, fp32], ids=str)
@pytest.mark.parametrize(
    "D, E", [(16, 16), (32, 32), (80, 80), (96, 96), (128, 128), (192, 192), (192, 128), (256, 256)]
)
def test_widths(D, E, dtype):
    """Fewer queries than keys."""
    tensors = draw(6, 2, D, E, 131, 333, 16, dtype)
    assert_layer_right(tensors, sizes(), forced=FORCED)


@pytest.mark.parametrize("dtype", [bf16, fp32], ids=str)
@pytest.mark.parametrize(
    "l, d, s, n",
    [(16, 16, 16, 64), (16, 8, 32, 40), (32, 16, 32, 12), (32, 32, 64, 32), (64, 32, 128, 6)],
)
@pytest.mark.parametrize("heads", [(16, 1), (4, 2)], ids=str)
def test_blocks(heads, l, d, s, n, dtype):
    S = 3 * s * n // 2 + 37
    tensors = draw(*heads, 128, 128, 200, S, d, dtype)
    assert_layer_right(tensors, sizes(l, d, s, n), forced=FORCED)


@pytest.mark.parametrize("dtype", [bf16, fp16], ids=str)
@pytest.mark.parametrize("heads", [(16, 1), (12, 2), (8, 2), (2, 2)], ids=str)
@pytest.mark.parametrize("stride", [1, 4])
def test_in_triton(heads, stride, dtype):
    """What a Hopper computes by kernels of its own, by those that other GPUs take."""
    tensors = draw(*heads, 128, 128, 640, 640, 16, dtype)
    with launch.using(IN_TRITON):
        assert_layer_right(tensors, sizes(), forced=FORCED, selection_stride=stride)


@pytest.mark.parametrize("heads", [(16, 1), (6, 2), (2, 2)], ids=str)
@pytest.mark.parametrize(
    "settings",
    [
        {"importance": "probs"},
        {"causal": False},
        {"causal": False, "importance": "probs", "query_heads_share_selected_kv": False},
        {"query_heads_share_selected_kv": False},
        {"interpolated_importance_score": True},
        {"recompute": True},
    ],
    ids=lambda settings: ", ".join(settings),
)
def test_settings(heads, settings):
    causal = settings.get("causal", True)
    tensors = draw(*heads, 128, 128, 500, 500, 16, bf16, causal, memory=2)
    assert_layer_right(tensors, sizes(), **{"forced": FORCED, **settings})


def test_gates_of_rows_far_apart():
    """The third of three begins more than 2^31 elements behind the first."""
    B, T, H, D, apart = 3, 128, 64, 128, (1 << 30) + 64
    if torch.cuda.mem_get_info()[0] < 6 * apart:
        pytest.skip("needs 6.5 GB")
    shapes = (B, T, H, D), (B, T, 1, D), (B, T, 1, D), (B, T, H, 3)
    q, k, v, gates = (torch.randn(shape, device=DEVICE).to(bf16) for shape in shapes)
    ck, cv = (pooled(t, 32, 16) for t in (k, v))
    room = gates.new_empty((B - 1) * apart + gates[0].numel())
    far = room.as_strided(gates.shape, (apart, *gates.stride()[1:])).copy_(gates)
    settings = sizes(n=2, w=63) | dict(backend="triton")
    outs = [native_sparse_attention(q, k, v, ck, cv, each, **settings) for each in (gates, far)]
    assert torch.equal(*outs)
