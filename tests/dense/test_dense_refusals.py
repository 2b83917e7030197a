"""What the dense family refuses: the argument is named."""

import math

import pytest
import torch

from native_sparse_attention import (
    SegmentIds,
    block_masked_attention,
    chunked_attention,
    mask_blocker,
    mha_reference,
    mha_reference_bwd,
    mha_reference_no_custom_vjp,
)


def draw(*shapes):
    return dict(zip("qkv", map(torch.randn, shapes), strict=True))


TRUE, IDS = torch.ones(9, dtype=torch.bool), torch.zeros(2, 7).long()
CALLS = {
    chunked_attention: (
        draw((2, 5, 4, 4), (2, 6, 2, 4), (2, 6, 2, 4)),
        {
            "soft_cap must be a number of at least 1.2e-38 or None, got 0.0": dict(soft_cap=0.0),
            "mask must be a bool tensor on cpu, got a torch.float32": dict(mask=torch.ones(6, 5)),
            r"mask must broadcast to \[B H T S\] = \[2, 4, 5, 6\], got \[9\]": dict(mask=TRUE),
            r"mask_mod must be a function of \(b, h, i, j\) or None, got 3": dict(mask_mod=3),
            "what mask_mod returns must be a bool tensor on cpu, got a torch.int64": dict(
                mask_mod=lambda b, h, i, j: i + j
            ),
            r"what mask_mod returns must broadcast to \[b h i j\] = .* got \[9\]": dict(
                mask_mod=lambda b, h, i, j: TRUE
            ),
            "one tensor .B, T. where T = S, .* for T=5 and S=6": dict(segment_ids=IDS[:, :5]),
            "segment_ids.q must be integers of .* on cpu, got a torch.float32": dict(
                segment_ids=(torch.zeros(2, 5), torch.zeros(2, 6))
            ),
            r"segment_ids.kv must be .* of shape \[2, 6\] on cpu, got .*\[2, 7\]": dict(
                segment_ids=SegmentIds(IDS[:, :5], IDS)
            ),
            "segment_ids must be SegmentIds": dict(segment_ids="ab"),
            "q_offset must be an int or a tensor": dict(q_offset=1.5),
            r"q_offset.* must be int32 or int64 of shape \[2\]": dict(q_offset=IDS[0, :3]),
            "v has S=7 but k has S=6": dict(v=torch.zeros(2, 7, 2, 4)),
        },
    ),
    block_masked_attention: (
        draw((2, 2, 1, 4, 4), (2, 2, 6, 4), (2, 2, 6, 4))
        | dict(segment_ids=None, block_kv=2, block_q=2, mask=torch.ones(4, 6), mask_value=-1e30),
        {
            "cap must be a number of at least 1.2e-38 or None, got -1.0": dict(cap=-1.0),
            "mask_value must be a number below inf, got nan": dict(mask_value=math.nan),
            r"mask must have shape \[4, 6\] or \[2, 4, 6\], got .* \[3, 4\]": dict(
                mask=torch.ones(3, 4)
            ),
            "k has D=3 but q has D=4": dict(k=torch.zeros(2, 2, 6, 3)),
        },
    ),
    mask_blocker: (
        dict(mask=torch.ones(3, 3), block_q=2, block_kv=2),
        {r"of shape \[3\]": dict(mask=torch.ones(3)), r"got \[1\]": dict(mask=[1])},
    ),
    mha_reference: (
        draw((2, 1, 4, 4), (2, 1, 5, 4), (2, 1, 5, 4)),
        {
            r"ab must broadcast to \[B H T S\] = \[2, 1, 4, 5\]": dict(ab=torch.zeros(2, 3, 4)),
            "ab must be floating on cpu, got a torch.int64": dict(ab=torch.zeros(4, 5).long()),
            "k has H=2 but q has H=1": dict(k=torch.zeros(2, 2, 5, 4)),
        },
    ),
}


@pytest.mark.parametrize(
    ("op", "message"), [(op, message) for op, (_, bad) in CALLS.items() for message in bad]
)
def test_arguments_are_named(op, message):
    call, bad = CALLS[op]
    with pytest.raises(ValueError, match=message):
        op(**call | bad[message])


def test_backward_refuses_residuals_that_do_not_fit():
    q, k, v = draw((1, 1, 4, 4), (1, 1, 5, 4), (1, 1, 5, 4)).values()
    o, l, m = mha_reference_no_custom_vjp(q, k, v, save_residuals=True)
    with pytest.raises(ValueError, match="do has E=3 but v has E=4"):
        mha_reference_bwd(q, k, v, None, None, o, l, m, o[..., :3])
    with pytest.raises(ValueError, match="l has T=3 but q has T=4"):
        mha_reference_bwd(q, k, v, None, None, o, l[..., :3], m, o)
