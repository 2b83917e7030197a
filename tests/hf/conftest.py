"""Tests of the kernels run on the GPU where there is one."""

from collections.abc import Iterator
from contextlib import nullcontext

import pytest
import torch


@pytest.fixture(autouse=True)
def device_of_kernels(request: pytest.FixtureRequest) -> Iterator[None]:
    on_gpu = torch.cuda.is_available() and request.node.get_closest_marker("kernels")
    with torch.device("cuda") if on_gpu else nullcontext():
        yield
