"""Lengths of a fixed cache in a compiled step, which a GPU checks as it reads them."""

import pytest
import torch

from native_sparse_attention.kernels.decode import kv_cache
from tests.helpers.budget import DEVICE
from tests.helpers.processes import python

pytestmark = pytest.mark.kernels

HELD = [3, 0, 8, 5] * 50  # more than one program
TOO_MANY = {
    "full": ([*HELD[:199], 9], None),
    "more than there are": ([0, 0], [2, 5]),
    "negative": ([5, 5], [2, -1]),
}


def starts(lengths, counts):
    counts = None if counts is None else torch.tensor(counts, device=DEVICE)
    return kv_cache.starts(torch.tensor(lengths, device=DEVICE).int(), counts, 4, 12)


@pytest.mark.parametrize("counts", [None, [4, 0, 4, 1] * 50])
def test_lengths_of_new_tokens_that_fit(counts):
    int64 = starts(HELD, counts)
    assert int64.dtype == torch.int64 and int64.tolist() == HELD


@pytest.mark.gpu
@pytest.mark.parametrize("case", TOO_MANY)
def test_tokens_that_do_not_fit(case):
    """A process cannot go on after an assertion."""
    code = "import torch; from tests.kernels.decode.test_cache_starts import TOO_MANY, starts; "
    code += f"starts(*TOO_MANY[{case!r}]); torch.cuda.synchronize()"
    done = python("-c", code)
    assert done.returncode != 0
    assert "cache is full, or lengths are not between 0 and n" in done.stderr
