"""`kernels/common/reduce.py`, in the interpreter without a GPU: sums of shares of dk and dv."""

import pytest
import torch

from native_sparse_attention.kernels.common import reduce
from tests.helpers.budget import DEVICE

pytestmark = pytest.mark.kernels


def draw(B, K, D, E, *parts):
    """Keys and values of 37 positions, and of each part so many shares of so many keys."""
    k, v = (torch.zeros(B, 37, K, width, device=DEVICE) for width in (D, E))
    drawn = [
        tuple(torch.randn(count, B, n, K, width, device=DEVICE) for width in (D, E))
        for count, n in parts
    ]
    return k, v, drawn


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "B, K, D, E, parts",
    [
        (1, 1, 16, 16, [(2, 37)]),
        (2, 2, 24, 40, [(5, 37), (9, 12)]),
        (3, 1, 80, 16, [(1, 5), (4, 37), (1, 37)]),
        (2, 3, 17, 17, [(1, 37)]),
        (2, 2, 24, 40, [(1, 37), (3, 12)]),
        (2, 1, 16, 48, [(1, 37), (1, 7), (2, 37)]),
    ],
)
def test_add_up(B, K, D, E, parts, dtype):
    """As sums in float64, past the shares' keys too, and rounded once."""
    k, v, drawn = draw(B, K, D, E, *parts)
    sums = [t.double() for t in (k, v)]
    for part in drawn:
        for right, d in zip(sums, part, strict=True):
            right[:, : d.shape[2]] += d.double().sum(0)
    for found, right in zip(reduce.reduce_partials(drawn, k, v, dtype), sums, strict=True):
        assert found.dtype == dtype and found.is_contiguous()
        torch.testing.assert_close(found, right.to(dtype), rtol=torch.finfo(dtype).eps, atol=2e-6)


def test_in_place():
    """One partial of all keys is not copied: others, if any, are added to it."""
    k, v, (first, *others) = draw(2, 2, 16, 24, (1, 37), (3, 12))
    for inputs in ([first], [first, *others]):
        dk, dv = reduce.reduce_partials(inputs, k, v)
        assert dk.data_ptr() == first[0].data_ptr() and dv.data_ptr() == first[1].data_ptr()
    _, other = reduce.reduce_partials([first, *others], k, v, torch.float16)
    assert other.data_ptr() != first[1].data_ptr()
