"""torch.export with dynamic batch and length: the program equals the layer at every length."""

import io

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from native_sparse_attention import SparseAttention, Transformer, compress
from native_sparse_attention.compat.graphs import is_exporting

GEOMETRY = dict(
    dim=24, dim_head=8, heads=4, kv_heads=2, sliding_window_size=8, compress_block_size=8,
    compress_block_sliding_stride=4, selection_block_size=8, num_selected_blocks=2,
)  # fmt: skip
BATCH, LENGTH = torch.export.Dim("batch", max=64), torch.export.Dim("length", max=4096)
# torch 2.8 asks of a size whether it is 0, in its product of matrices
of_any_length = pytest.mark.skipif(
    torch.__version__.startswith("2.8."), reason="a dynamic length needs torch 2.9 or later"
)
LENGTHS = (1, 2, 3, 4, 7, 8, 9, 41, 64)


def exported(module, example, dims=None, **kwargs):
    dims = {0: BATCH, 1: LENGTH} if dims is None else dims
    return torch.export.export(module, (example,), dynamic_shapes=(dims,), **kwargs)


def assert_equals_layer(program, layer, shapes, make):
    run = program.module()
    for shape in shapes:
        x = make(*shape)
        torch.testing.assert_close(run(x), layer(x))


@pytest.mark.slow(one_of=4)
@of_any_length
@pytest.mark.parametrize(
    "settings",
    [
        dict(causal=True, interpolated_importance_score=True, selection_stride=4,
             use_diff_topk=True),
        dict(causal=False, importance="probs", num_compressed_mem_kv=0, soft_cap=5.0,
             branch_kv="independent", attention_sinks=True, compress_mlp=compress.MeanPool()),
        dict(causal=True, branches=("selected",), importance="max", rank_rotated=True),
        dict(causal=True, branches=("selected",), importance="index", dense_length=16),
    ],
    ids=["causal", "both_sides", "one softmax", "index, dense at first"],
)  # fmt: skip
def test_layer_of_any_length(settings):
    torch.manual_seed(0)
    layer = SparseAttention(**GEOMETRY, **settings).eval().requires_grad_(False)
    program = exported(layer, torch.randn(2, 40, 24))
    shapes = [(batch, n) for batch in (1, 3) for n in LENGTHS]
    assert_equals_layer(program, layer, shapes, lambda b, n: torch.randn(b, n, 24))


@of_any_length
def test_length_alone_is_dynamic():
    torch.manual_seed(0)
    layer = SparseAttention(**GEOMETRY, causal=True).eval().requires_grad_(False)
    program = exported(layer, torch.randn(2, 40, 24), {1: LENGTH})
    assert_equals_layer(
        program, layer, [(2, n) for n in LENGTHS], lambda b, n: torch.randn(b, n, 24)
    )


@pytest.mark.slow(one_of=2)
@of_any_length
# torch's own, as it loads
@pytest.mark.filterwarnings("ignore:The given buffer is not writable")
@pytest.mark.parametrize("sparse", [False, True])
def test_transformer_is_saved_and_loaded(sparse):
    torch.manual_seed(0)
    model = Transformer(17, 16, 1, dim_head=8, heads=2, use_sparse_attn=sparse)
    model = model.eval().requires_grad_(False)
    program = exported(model, torch.randint(17, (2, 40)))
    if sparse and torch.__version__.startswith("2.9."):
        pytest.skip("torch 2.9 cannot load a program with a size that it computes")
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    shapes = [(1, 2), (3, 13), (2, 70)]
    program = torch.export.load(file)
    assert_equals_layer(program, model, shapes, lambda b, n: torch.randint(17, (b, n)))


class Told(torch.nn.Module):
    def forward(self, x):
        return x + 1 if is_exporting() else x


def test_export_is_told_from_compilation():
    x = torch.zeros(2)
    assert torch.compile(Told(), backend="eager", fullgraph=True)(x).sum() == 0
    for strict in (False, True):
        assert torch.export.export(Told(), (x,), strict=strict).module()(x).sum() == 2


@pytest.mark.slow
def test_a_training_step_is_one_graph():
    shape = ("dim", "dim_head", "heads", "kv_heads")
    settings = {name: value for name, value in GEOMETRY.items() if name not in shape}
    model = Transformer(
        num_tokens=16, dim=24, depth=1, heads=2, use_sparse_attn=True, sparse_attn_kwargs=settings
    )
    ids = torch.randint(16, (2, 33))
    torch.manual_seed(0)
    expected = model(ids, return_loss=True)
    graphs = CompileCounterWithBackend("aot_eager")
    loss = torch.compile(model, backend=graphs)(ids, return_loss=True)
    loss.backward()
    assert graphs.frame_count == 1
    torch.testing.assert_close(loss, expected)
    assert all(p.grad is not None for p in model.parameters())
