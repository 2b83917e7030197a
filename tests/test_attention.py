"""SparseAttention: the laws, for every setting, and what a user does to a module."""

import copy
import io
import itertools
import pickle

import pytest
import torch
import torch.nn.functional as F
from rotary_embedding_torch import RotaryEmbedding
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention.flex_attention import create_block_mask

from native_sparse_attention import SparseAttention, sliding_window_attention, varlen
from native_sparse_attention.masks import create_fine_mask, create_sliding_mask
from tests.helpers.layers import DIM, PARTS, SETTINGS, SIZES, close, layer, normal, step

every = pytest.mark.parametrize("setting", SETTINGS)
both = pytest.mark.parametrize("causal", [True, False])
DOCUMENTS = [13, 0, 1, 32, 5]
BOUNDS = torch.tensor([0, *DOCUMENTS]).cumsum(0)


def trained(module):
    """The parameters but the index of a learned ranking, which has a loss of its own."""
    return {
        name: p
        for name, p in module.named_parameters()
        if p.requires_grad and not name.startswith("to_index")
    }


def assert_gradients(module, out):
    """Every parameter has one, finite: data-parallel training needs no setting. No backward on the
    way makes NaN."""
    module.zero_grad()
    with torch.autograd.set_detect_anomaly(True):
        out.sum().backward()
    for name, p in trained(module).items():
        assert p.grad is not None and p.grad.isfinite().all(), name


KINDS = {name: lambda settings=settings: settings for name, settings in SETTINGS.items()} | PARTS


@pytest.mark.slow(one_of=6)
@both
@pytest.mark.parametrize("kind", KINDS)
def test_any_length(kind, causal):
    """Of padding alone, packed and without rows too."""
    module = layer(**KINDS[kind](), causal=causal)

    def check(rows, length, **call):
        x = normal(rows, length, DIM).requires_grad_()
        out = module(x, **call)
        assert out.shape == x.shape and out.isfinite().all()
        assert_gradients(module, out)
        assert x.grad.isfinite().all()

    for n in (0, 1, 2, 3, 4, 7, 8, 9, 16, 17, 31):
        check(2, n)
    for n in (0, 1, 21):
        mask = torch.arange(n).expand(2, -1) >= torch.tensor([[0], [n // 2]])
        check(2, n, mask=mask)
        check(2, n, mask=mask & False)
        check(0, n)
        check(0, n, mask=mask[:0])
        check(1, n, cu_seqlens=torch.tensor([0, n // 3, n]))


@pytest.mark.slow(one_of=3)
@both
@every
def test_rows_padding_and_documents(setting, causal):
    """A row alone is the row in a batch, between padding on either side, or packed with others:
    outputs and gradients."""
    module = layer(**SETTINGS[setting] | dict(out_bias=True), causal=causal)
    nn.init.normal_(module.combine_heads.bias)
    x = normal(4, 29, DIM)
    mask = torch.ones(4, 29, dtype=torch.bool)
    mask[0, :9] = mask[1, 17:] = mask[2, :3] = mask[2, 20:] = mask[3] = False
    out, leaf = module(x), torch.where(mask[..., None], x, torch.nan).requires_grad_()
    padded = module(leaf, mask=mask)
    assert (padded[~mask] == 0).all()
    assert_gradients(module, padded)
    assert leaf.grad.isfinite().all() and (leaf.grad[~mask] == 0).all()
    for row in range(3):
        close(module(x[row : row + 1]), out[row : row + 1])
        close(padded[row, mask[row]], module(x[row : row + 1, mask[row]])[0])

    x = normal(1, sum(DOCUMENTS), DIM).requires_grad_()
    weight, results = torch.randn_like(x), []
    alone = torch.cat([module(t) for t in x.split(DOCUMENTS, 1)], 1)
    ids = torch.repeat_interleave(torch.arange(5), torch.tensor(DOCUMENTS))[None]
    for out in (alone, module(x, cu_seqlens=BOUNDS)):
        wanted = [x, *trained(module).values()]
        grads = torch.autograd.grad((out * weight).sum(), wanted, materialize_grads=True)
        results.append([out, *grads])
    close(*results, 1e-11)
    assert torch.equal(module(x, segment_ids=ids), out)


@both
def test_aligned_documents(causal):
    """What lies between documents reaches nobody."""
    module, x = layer(causal=causal), normal(1, sum(DOCUMENTS), DIM)
    layout = varlen.layout((1, x.shape[1]), x.device, module.config.alignment, cu_seqlens=BOUNDS)
    rows = layout.spread(x)
    rows = torch.where((layout.source < 0)[..., None], torch.randn_like(rows) * 9, rows)
    out = layout.collect(module(rows, documents=layout.documents))
    close(out, module(x, cu_seqlens=BOUNDS))


def test_no_tokens_at_all():
    """There is nothing to run, whichever backend is asked for."""
    q = torch.zeros(0, 2, 16, requires_grad=True)
    call = dict(sliding_window_size=2, cu_seqlens=torch.zeros(3, dtype=torch.int32))
    for backend in ("eager", "flex"):
        assert sliding_window_attention(q, q, q, backend=backend, **call).shape == q.shape


@pytest.mark.slow(one_of=8)
@pytest.mark.parametrize("length", [1, 13, 40, 150])
@both
@pytest.mark.parametrize("setting", ["default", "own rankings", "paper", "independent"])
@torch.no_grad()
def test_masks_of_the_caller(setting, causal, length, untraced_flex):
    """Ours, and one made from block indices of 0 and more alone, as published ones are."""
    module = layer(**SETTINGS[setting], causal=causal, dtype=torch.float32)
    x = normal(2, length, DIM, dtype=torch.float32)
    blocks = -(-length // 8)

    def fine_mask(indices, num_grouped_queries=1):
        assert indices.min() >= 0
        b, h = indices.shape[:2]
        chosen = torch.zeros(b, h, length, blocks, dtype=torch.bool).scatter_(-1, indices, True)

        def is_seen(b, h, i, j):
            is_chosen = chosen[b, h // num_grouped_queries, i, j // 8]
            return (i >= j) & (is_chosen | (i // 8 == j // 8)) if causal else is_chosen

        return create_block_mask(is_seen, b, h * num_grouped_queries, length, length, device="cpu")

    window = create_sliding_mask(length, 5, causal, "cpu")
    fine = create_fine_mask(length, 8, causal=causal)
    out = module(x, sliding_window_flex_mask=window, fine_selection_flex_mask=fine)
    close(out, module(x), 1e-5)
    if length == 40 and setting != "independent":
        close(module(x, fine_selection_flex_mask=fine_mask), module(x), 1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_dtypes(dtype):
    """A cast layer stays near the fp64 one, far into a sequence too: its rotary angles are fp32."""
    # all blocks selected: no near-tie in the ranking can matter
    exact = layer(num_selected_blocks=500)
    cast = copy.deepcopy(exact).to(dtype)
    assert cast.rotary_emb.freqs.dtype == (torch.float32 if dtype.itemsize == 2 else dtype)
    exact.load_state_dict(cast.state_dict())
    x = normal(1, 600, DIM).to(dtype)
    out, expected = cast(x), exact(x.double())
    assert out.dtype == dtype
    error = (out.double() - expected).norm() / expected.norm()
    assert error < 16 * torch.finfo(dtype).eps


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("branch_kv", ["shared", "independent"])
def test_autocast_casts_all_that_attends(dtype, branch_kv):
    """Windows with their positions, summaries, memory and gates too; near what float32 gives."""
    # as many blocks as there are: nothing hangs on a near-tie
    module = layer(torch.float32, branch_kv=branch_kv, num_selected_blocks=6)
    x, given = torch.randn(2, 33, DIM, requires_grad=True), {}
    expected = step(module, x)
    module.observer = lambda call, config, indices: given.update(call._asdict())
    for name in ("k_compress", "v_compress"):
        network = module.get_submodule(name)
        network.register_forward_pre_hook(lambda _, args, name=name: given.update({name: args[0]}))
    with torch.autocast("cpu", dtype=dtype):
        actual = step(module, x)
    tensors = {name: t for name, t in given.items() if isinstance(t, torch.Tensor)}
    assert {"q", "cq", "k", "v", "ck", "cv", "mem_k", "mem_v", "branch_gates", "k_compress",
            "v_compress"} <= tensors.keys()  # fmt: skip
    assert {t.dtype for t in tensors.values()} == {dtype}
    for a, b in zip(actual, expected, strict=True):
        error = (a.float() - b).norm() / b.norm()
        assert error < 32 * torch.finfo(dtype).eps


@every
def test_autocast(setting):
    module = layer(**SETTINGS[setting], dtype=torch.float32)
    x = normal(2, 33, DIM, dtype=torch.float32).requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out, cache = module(x, return_cache=True)
        step, _ = module(x[:, :3].detach(), cache=cache, return_cache=True)
    assert out.dtype == torch.bfloat16 and step.shape == (2, 3, DIM)
    out.float().sum().backward()
    assert x.grad.dtype == torch.float32 and x.grad.isfinite().all()


@pytest.mark.slow(one_of=16)
# torch says so of its own deepcopy
@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")
@pytest.mark.parametrize(
    "mode", [lambda: torch.device("meta"), FakeTensorMode], ids=["meta", "fake"]
)
@both
@every
def test_tensors_without_data(setting, causal, mode):
    """Shapes of a forward, a backward and a cache."""
    with mode():
        module = SparseAttention(**SIZES | dict(causal=causal) | SETTINGS[setting])
        mask = torch.ones(2, 20, dtype=torch.bool)
        calls = [(20, {}), (20, dict(mask=mask)), (2000, {})]
        # how much padding there is, is data of a fake tensor
        for n, call in calls[: (3 if setting == "default" else 2) if mask.is_meta else 1]:
            x = torch.randn(2, n, DIM, requires_grad=True)
            out = module(x, **call)
            assert out.device == x.device and out.shape == x.shape and out.dtype == x.dtype
            out.sum().backward()
            assert x.grad.shape == x.shape
        if causal and x.is_meta:
            with torch.no_grad():
                _, cache = module(x[:, :20], return_cache=True)
                assert module(x[:, :1], cache=cache).shape == (2, 1, DIM)
    assert all(p.grad.shape == p.shape for p in trained(module).values())


@pytest.mark.slow(one_of=3)
@every
def test_a_layer_travels(setting):
    """By a file, a copy, a pickle, and into a layer made on the meta device."""
    module, x = layer(torch.float32, **SETTINGS[setting]), torch.randn(2, 20, DIM)
    expected, file = module(x), io.BytesIO()
    torch.save(module.state_dict(), file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    given = SIZES | dict(num_compressed_mem_kv=2, causal=True) | SETTINGS[setting]
    with torch.device("meta"):
        empty, assigned = (SparseAttention(**given) for _ in range(2))
    empty.to_empty(device="cpu").load_state_dict(saved)
    assigned.load_state_dict(saved, assign=True)
    other = layer(torch.float32, **SETTINGS[setting])
    other.load_state_dict(saved)
    copies = copy.deepcopy(module), pickle.loads(pickle.dumps(module))
    for moved in (empty, assigned, other, *copies):
        assert moved.config == module.config and torch.equal(moved(x), expected)
    close(module.eval()(x), module.train()(x))


def test_a_layer_without_memory_keeps_its_name_in_checkpoints():
    """As the published package has it, whose other names `test_published.py` holds."""
    module = layer(num_compressed_mem_kv=0)
    assert "compress_mem_kv" not in dict(module.named_parameters())
    saved = {name: torch.zeros_like(t) for name, t in module.state_dict().items()}
    assert saved["compress_mem_kv"].shape == (2, 2, 0, 8)
    module.load_state_dict(saved, strict=True)


def test_parts_are_used():
    rotary = RotaryEmbedding(8, learned_freq=True)
    module, x = layer(**PARTS["mean"](), **PARTS["gate"](), rotary_emb=rotary), normal(1, 30, DIM)
    assert module.rotary_emb is rotary and module.k_compress is not module.v_compress
    assert module(x).shape == x.shape
    plain, module = layer(), layer(rotary_emb=RotaryEmbedding(8))
    module.load_state_dict(plain.state_dict())
    close(module(x), plain(x))


@pytest.mark.parametrize("branch_kv", ["shared", "independent"])
def test_biases_and_norms_of_heads(branch_kv):
    """Those of a plain layer on a projection that has them."""
    settings = dict(branch_kv=branch_kv, qkv_bias=True, out_bias=True, qk_norm=True)
    module, plain = layer(**settings, qk_norm_eps=1e-3), layer(branch_kv=branch_kv)
    saved = module.state_dict()
    plain.load_state_dict({name: saved[name] for name in plain.state_dict()})
    x = normal(2, 37, DIM)

    class Projection(nn.Module):
        def forward(self, x):
            q, *kv = module.to_qkv(x).split(module.qkv_split, dim=-1)
            keys = ((q, module.q_norm.weight), *((k, module.k_norm.weight) for k in kv[::2]))
            q, *ks = (
                F.rms_norm(t.unflatten(-1, (-1, 8)), (8,), eps=1e-3).mul(w).flatten(-2)
                for t, w in keys
            )
            pairs = itertools.chain(*zip(ks, kv[1::2], strict=True))
            return torch.cat((q, *pairs), dim=-1)

    plain.to_qkv = Projection()
    plain.to_qkv.weight = module.to_qkv.weight
    close(module(x), plain(x) + module.combine_heads.bias)
