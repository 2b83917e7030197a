"""Against the published package native-sparse-attention-pytorch, with random weights everywhere.

0.2.3 where the stride d is given, 0.1.12 where it is not. Outputs and every gradient, wherever the
published layer is sane; `docs/differences.md` lists where it is not.
"""

import pytest
import torch

from native_sparse_attention import SparseAttention, Transformer
from tests.helpers.layers import randomize, step
from tests.helpers.sizes import sizes

DIM = 48

# arguments both packages take; the published one drops blocks whose softmax falls to 1e-10, which
# weights of this size stay away from
SIZES = dict(l=8, d=4, s=8, n=3, w=9)
WITH_STRIDE = {
    "overlap": {},
    "no overlap": dict(d=8, n=2, w=4),
    "paper": dict(s=16, n=2, w=16, kv_heads=1),
    "mha": dict(l=6, d=2, s=4, n=4, w=3, kv_heads=4),
    "unshared": dict(query_heads_share_selected_kv=False),
    "memory": dict(l=4, s=4, w=5, num_compressed_mem_kv=3),
    "diff top-k": dict(use_diff_topk=True),
    "no selection": dict(n=0),
    "no norm": dict(n=2, norm=False),
    "few hidden units": dict(compress_mlp_expand_factor=0.3),
}
WITHOUT_STRIDE = {
    "equal": dict(d=None, n=2),
    "mha, 0.1.12": dict(l=4, d=None, s=4, w=5, kv_heads=4, num_compressed_mem_kv=2),
    "fine blocks larger": dict(l=4, d=None, n=2),
    "few hidden units, 0.1.12": dict(d=None, n=2, compress_mlp_expand_factor=0.3),
    "diff top-k, 0.1.12": dict(d=None, n=2, use_diff_topk=True),
}
# not causal, the published layer is sane where d = s and everything divides the length
TWO_SIDED = {
    "two-sided": dict(d=8, n=2, w=8, causal=False),
    "unshared, two-sided": dict(d=8, w=16, causal=False, query_heads_share_selected_kv=False),
    "diff top-k, two-sided": dict(d=8, n=2, w=8, causal=False, use_diff_topk=True),
}
CASES = [(case, "0.2.3", n) for case in WITH_STRIDE for n in (8, 16, 31, 64, 77)]
CASES += [(case, "0.1.12", n) for case in WITHOUT_STRIDE for n in (16, 32, 61, 64)]
CASES += [(case, "0.2.3", n) for case in TWO_SIDED for n in (32, 64)]


def layers(published, case, version):
    """Theirs and ours, weights loaded both ways."""
    changed = (WITH_STRIDE | WITHOUT_STRIDE | TWO_SIDED)[case]
    shape = dict(dim=DIM, dim_head=16, heads=4, kv_heads=2, causal=True)
    kwargs = sizes(**SIZES | shape | changed)
    theirs = randomize(published(version).SparseAttention(**kwargs))
    ours = SparseAttention(**kwargs)
    ours.load_state_dict(theirs.state_dict(), strict=True)
    theirs.load_state_dict(ours.state_dict(), strict=True)
    return theirs, ours


@pytest.mark.slow(one_of=3)
@pytest.mark.parametrize("case, version, length", CASES)
def test_layer(published, case, version, length):
    """Outputs and every gradient."""
    x, results = torch.randn(2, length, DIM), []
    for layer in layers(published, case, version):
        names = [name for name, p in layer.named_parameters() if p.requires_grad]
        results.append(dict(zip(["output", "input", *names], step(layer, x), strict=True)))
    torch.testing.assert_close(results[1], results[0], atol=1e-5, rtol=1e-5)


@pytest.mark.filterwarnings("ignore:sparse_attn_kwargs are not used")
def test_transformer(published):
    """Names and values of a whole model, sparse and dense."""
    theirs_module = published("0.2.3").transformer
    kwargs = dict(num_tokens=64, dim=32, depth=2, dim_head=16, heads=2)
    sparse = sizes(8, 4, 8, n=2, w=8)
    ids = torch.randint(0, 64, (2, 41))
    for use_sparse_attn in (True, False):
        both = dict(kwargs, use_sparse_attn=use_sparse_attn, sparse_attn_kwargs=sparse)
        ours = Transformer(**both)
        theirs = randomize(theirs_module.Transformer(**both))
        ours.load_state_dict(theirs.state_dict(), strict=True)
        if not use_sparse_attn:
            # the published forward cannot run its dense layers (they return no cache)
            continue
        torch.testing.assert_close(ours(ids), theirs(ids), atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(
            ours(ids, return_loss=True), theirs(ids, return_loss=True), atol=1e-5, rtol=1e-5
        )
