"""Keys packed to 4 bits: a kernel packs the bytes of the specification, and steps that read them
choose its blocks. Caches that keep them: test_decode.py, cache/test_cache.py."""

import pytest
import torch

from native_sparse_attention import decode_attention, pack_keys
from native_sparse_attention.kernels.decode import packed
from native_sparse_attention.ops import reference
from tests.helpers.budget import CUDA, DEVICE
from tests.helpers.sizes import sizes

pytestmark = pytest.mark.kernels


@pytest.mark.parametrize("D, m", [(16, 8), (35, 4), (128, 64), (24, 24), (18, 1)])
def test_bytes(D, m):
    k = torch.randn(2, 3 * m + m // 2, 2, D, device=DEVICE)
    k[0, :m], k[..., 1] = 0, k[..., 1] + 4
    for k in (k, k.half()):  # noqa: B020
        right, used = reference.pack_keys(k, m), (m + 8) * ((D + 3) // 4) + 2
        assert right.shape == (2, 3, 2, -(-used // 16) * 16)
        for found in (packed.pack_keys(k, m), pack_keys(k, m)):
            assert torch.equal(found[..., :used], right[..., :used])


def test_steps_choose_to_the_bit():
    """By keys as a cache has them, and packed; and what is refused of these."""
    T = 16 if CUDA else 4
    q, k, v = (torch.randn(2, n, h, 16, device=DEVICE) for n, h in ((T, 4), (280, 2), (280, 2)))
    settings = sizes(1, 1, 16, n=9, w=0, branches=("selected",), importance="head_max")
    settings |= dict(ranking_bits=4, lengths=torch.tensor([260, 77], device=DEVICE), cv=None)
    settings |= dict(branch_gates=None, return_block_indices=True)
    out, right = decode_attention(q, k, v, k, **settings, backend="eager")
    ck = pack_keys(k, 16)
    for keys, backend in ((k, "triton"), (ck, "triton"), (ck, "eager")):
        found, indices = decode_attention(q, k, v, keys, **settings, backend=backend)
        assert torch.equal(indices.sort().values, right.sort().values)
        torch.testing.assert_close(found, out, atol=1e-5, rtol=1e-5)
    for wrong, cq in ((ck[..., :-1], None), (ck, q)):
        with pytest.raises(ValueError, match="ck must"):
            decode_attention(q, k, v, wrong, cq=cq, **settings)
