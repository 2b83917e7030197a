"""Packed documents and padding through the modules: each document is what it is alone."""

import pytest
import torch

from native_sparse_attention import KVCache, Transformer, sliding_window_attention
from native_sparse_attention import varlen as docs
from tests.helpers.layers import DIM, SETTINGS, layer, randomize

LENGTHS = [13, 0, 1, 32, 5]


def bounds(lengths=LENGTHS):
    return torch.tensor([0, *lengths]).cumsum(0)


def close(actual, expected, tol=1e-12):
    torch.testing.assert_close(actual, expected, atol=tol, rtol=tol)


def grads(module, x, run):
    out = run(x)
    wanted = [x, *(p for p in module.parameters() if p.requires_grad)]
    weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=out.dtype)
    return out, torch.autograd.grad((out * weight).sum(), wanted, materialize_grads=True)


@pytest.mark.slow(one_of=3)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("setting", SETTINGS)
def test_documents_alone(setting, causal):
    module = layer(**SETTINGS[setting], causal=causal)
    x = torch.randn(1, sum(LENGTHS), DIM, dtype=torch.float64, requires_grad=True)
    packed = grads(module, x, lambda x: module(x, cu_seqlens=bounds()))
    alone = grads(module, x, lambda x: torch.cat([module(t) for t in x.split(LENGTHS, 1)], 1))
    close(packed[0], alone[0])
    for a, b in zip(packed[1], alone[1]):
        close(a, b, 1e-11)
    ids = torch.repeat_interleave(torch.arange(5), torch.tensor(LENGTHS))[None]
    assert torch.equal(module(x, segment_ids=ids), packed[0])


@pytest.mark.parametrize("causal", [True, False])
def test_aligned_documents(causal):
    """What lies between documents reaches nobody."""
    module = layer(causal=causal)
    x = torch.randn(1, sum(LENGTHS), DIM, dtype=torch.float64)
    layout = docs.layout((1, x.shape[1]), x.device, module.config.alignment, cu_seqlens=bounds())
    rows = layout.spread(x)
    rows = torch.where((layout.source < 0)[..., None], torch.randn_like(rows) * 9, rows)
    out = layout.collect(module(rows, documents=layout.documents))
    close(out, module(x, cu_seqlens=bounds()))


@pytest.mark.parametrize("causal", [True, False])
def test_padding_on_either_side(causal):
    module = layer(causal=causal, selection_stride=4)
    x = torch.randn(4, 24, DIM, dtype=torch.float64)
    mask = torch.ones(4, 24, dtype=torch.bool)
    mask[0, :9] = mask[1, 17:] = mask[2, :3] = mask[2, 20:] = mask[3] = False
    out = module(x, mask=mask)
    assert (out[~mask] == 0).all()
    for row in range(3):
        close(out[row, mask[row]], module(x[row : row + 1, mask[row]])[0])


@pytest.mark.parametrize("branches", [("selected",), ("compressed", "selected", "window")])
def test_padding_has_no_bias(branches):
    module = layer(branches=branches, out_bias=True)
    torch.nn.init.normal_(module.combine_heads.bias)
    x, mask = torch.randn(2, 24, DIM, dtype=torch.float64), torch.ones(2, 24, dtype=torch.bool)
    mask[0, 17:] = False
    out = module(x, mask=mask)
    assert (out[~mask] == 0).all()
    close(out[0, :17], module(x[:1, :17])[0])
    close(out, module(x, mask=mask, cache=KVCache()))


def test_padding_with_a_cache():
    """Left and right padding of a prefill, and of what follows."""
    check_padding_with_a_cache(layer(selection_stride=4))


@pytest.mark.kernels
def test_padding_with_a_cache_by_kernels():
    device = "cuda" if torch.cuda.is_available() else "cpu"
    settings = dict(selection_stride=4, heads=2, kv_heads=1, backend="triton")
    module = layer(torch.float32, **settings).to(device)
    check_padding_with_a_cache(module, 13, 4, 1e-4)


@torch.no_grad()
def check_padding_with_a_cache(module, prefill=30, step=11, tolerance=1e-12):
    weight = module.to_qkv.weight
    x = torch.randn(3, prefill + step, DIM, dtype=weight.dtype, device=weight.device)
    mask = torch.ones(3, prefill + step, dtype=torch.bool, device=weight.device)
    mask[0, : prefill // 2] = mask[1, -step - 3 : -step] = False
    mask[1, -step : 2 - step] = mask[2, -2:] = False
    cache = KVCache()
    outs = [
        module(x[:, :prefill], cache=cache, mask=mask[:, :prefill]),
        module(x[:, prefill:], cache=cache, mask=mask[:, prefill:]),
    ]
    assert cache.lengths == mask.sum(1).tolist()
    out = torch.cat(outs, 1)
    assert (out[~mask] == 0).all()
    module.backend = "eager"
    for row in range(3):
        alone = module(x[row : row + 1, mask[row]])[0]
        close(out[row, mask[row]], alone, tolerance)


def test_every_document_is_empty():
    """There is nothing to run, whichever backend is asked for."""
    q = torch.zeros(0, 2, 16, requires_grad=True)
    for backend in ("auto", "eager", "flex", "triton"):
        call = dict(sliding_window_size=4, backend=backend, cu_seqlens=torch.zeros(3).int())
        out = sliding_window_attention(q, q, q, **call)
        assert out.shape == (0, 2, 16)
        (grad,) = torch.autograd.grad(out.sum(), q)
        assert grad.shape == q.shape


both = pytest.mark.parametrize("use_sparse_attn", [True, False])


def model(use_sparse_attn, **kwargs):
    shape = dict(num_tokens=32, dim=16, depth=2, dim_head=8, heads=2, kv_heads=1)
    return randomize(Transformer(**shape, use_sparse_attn=use_sparse_attn, **kwargs)).double()


@both
@pytest.mark.parametrize("causal", [True, False])
def test_transformer(use_sparse_attn, causal):
    net = model(use_sparse_attn, causal=causal)
    ids = torch.randint(0, 32, (1, sum(LENGTHS)))
    alone = [net(t) for t in ids.split(LENGTHS, 1)]
    close(net(ids, cu_seqlens=bounds()), torch.cat(alone, 1))
    if not causal:
        return
    # what follows a document is not predicted
    losses = [
        net(t, return_loss=True) * (n - 1) for t, n in zip(ids.split(LENGTHS, 1), LENGTHS) if n > 1
    ]
    expected = sum(losses) / sum(n - 1 for n in LENGTHS if n > 1)
    loss = net(ids, return_loss=True, cu_seqlens=bounds())
    close(loss, expected, 1e-6)  # losses are float32
    assert net(ids[:, :2], return_loss=True, cu_seqlens=torch.tensor([0, 1, 2])) == 0


@both
def test_transformer_with_padding(use_sparse_attn):
    net = model(use_sparse_attn, activation_checkpointing=True)
    ids = torch.randint(0, 32, (2, 20))
    mask = torch.ones(2, 20, dtype=torch.bool)
    mask[0, :7] = mask[1, 15:] = False
    logits = net(ids, mask=mask)
    cached, _ = net(ids, mask=mask, return_cache=True)
    for row in range(2):
        alone = net(ids[row : row + 1, mask[row]])[0]
        close(logits[row, mask[row]], alone)
        close(cached[row, mask[row]], alone)
    net(ids, mask=mask, return_loss=True).backward()


def test_documents_that_do_not_go_together():
    module, x = layer(), torch.randn(1, 8, DIM, dtype=torch.float64)
    cu, mask = torch.tensor([0, 8]), torch.ones(1, 8, dtype=torch.bool)
    documents = docs.layout((1, 8), x.device, 8, cu_seqlens=cu).documents
    for kwargs, message in [
        (dict(cu_seqlens=cu, cache=KVCache()), "cu_seqlens must be None with a cache"),
        (dict(cu_seqlens=cu, documents=documents), "documents and cu_seqlens are two ways"),
        (dict(mask=mask, lengths=[8], cache=KVCache()), "mask and lengths are two ways"),
        (dict(mask=mask[:, :7]), r"mask must be bool of shape \[1, 8\]"),
        (dict(documents=[1]), "documents must be varlen.Documents, got list"),
    ]:
        with pytest.raises(ValueError, match=message):
            module(x, **kwargs)


@pytest.mark.parametrize("given", [{}, dict(cu_seqlens=torch.tensor([0, 8]))], ids=["rows", "cu"])
def test_tensors_that_are_none(given):
    q = torch.randn(1, 8, 2, 4)
    for k in (None, q.numpy()):
        with pytest.raises(ValueError, match="k must be a tensor, got"):
            sliding_window_attention(q, k, q, sliding_window_size=2, **given)


def test_compiles_in_one_graph():
    """Where documents lie is data: one graph for all that are as many and as long together."""
    q, k, v = (torch.randn(1, 51, 2, 8, dtype=torch.float64) for _ in range(3))

    def window(cu_seqlens):
        return sliding_window_attention(q, k, v, sliding_window_size=6, cu_seqlens=cu_seqlens)

    compiled = torch.compile(window, backend="aot_eager", fullgraph=True)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for lengths in (LENGTHS, [20, 9, 13, 0, 9]):
            close(compiled(bounds(lengths)), window(bounds(lengths)))
