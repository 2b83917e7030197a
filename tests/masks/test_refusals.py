"""What masks, score mods and attention over nested tensors refuse: the argument is named."""

import pytest
import torch

from native_sparse_attention import masks
from native_sparse_attention.masks import catalog
from tests.masks.test_jagged import nested

CPU = torch.device("cpu")

IDS = torch.tensor([0, 0, 1])
SPANS = torch.tensor([[0, 2]])
A, B = nested((2, 3), 2, 8)[0], nested((3, 2), 2, 8)[0]
OFFSETS = torch.tensor([0, 2, 5])
HOLES = torch.nested.nested_tensor_from_jagged(A.values(), OFFSETS, lengths=torch.tensor([1, 3]))
FULL = masks.jagged_block_mask(None, OFFSETS)
ROW = torch.randn(1, 1, 4, 8)


def twice(b, h, i, j):
    return 2 * (j <= i)


def attend(q=A, k=A, v=A, *args, **kwargs):
    return masks.jagged_attention(q, k, v, *args, **kwargs)


BAD = [
    (lambda: masks.dilated_window(1, 0), "dilation must be an integer of at least 1, got 0"),
    (lambda: masks.document(), "document_ids or offsets must be given, and not both, got neither"),
    (lambda: masks.document(IDS, offsets=IDS), "document_ids or offsets .* got both"),
    (lambda: masks.document(IDS.numpy()), "document_ids must be an integer tensor .* got array"),
    (lambda: masks.document(IDS > 0), "document_ids must be an integer tensor .* got a torch.bool"),
    (lambda: masks.document(offsets=torch.tensor([1, 4])), "offsets must hold 0 .* got .1, 4"),
    (lambda: masks.document(offsets=IDS.to("meta")), "offsets must be a tensor with values, got"),
    (lambda: masks.sasa(4, 4, 4), "kernel_height must be odd, .* got 4"),
    (lambda: masks.sasa(4, 4, 3, 2), "kernel_width must be odd, .* got 2"),
    (lambda: masks.natten(4, 9, 5), "kernel_height must be at most canvas_height=4, got 5"),
    (lambda: masks.natten(9, 4, 5), "kernel_width must be at most canvas_width=4, got 5"),
    (lambda: masks.flamingo(SPANS), "image_ids or image_token_length .* got neither"),
    (lambda: masks.flamingo(SPANS, IDS, image_token_length=2), "image_ids or .* got both"),
    (lambda: masks.flamingo(SPANS, image_token_length=0), "image_token_length must"),
    (lambda: masks.flamingo(SPANS[0], IDS), "intervals must be an integer tensor of 2 axes"),
    (lambda: masks.flamingo(SPANS.repeat(1, 2), IDS), r"intervals must have shape \[images, 2\]"),
    (lambda: catalog.make("nothing", 4, CPU), "name must be one of 'causal', .* got 'nothing'"),
    (lambda: catalog.make("document", 4, CPU, documents=5), "documents must be .* below 5"),
    (lambda: catalog.make("sasa", 10, CPU, canvas_width=3), "canvas_width must divide length=10"),
    (lambda: catalog.make("compress", 10, CPU, stride=11), "stride must be an .* below 11"),
    (lambda: masks.jagged_mask_mod(None, OFFSETS.float()), "offsets must be an integer tensor"),
    (lambda: masks.jagged_mask_mod(None, OFFSETS, OFFSETS[1:]), "kv_offsets must hold 0 and ends"),
    (lambda: attend(q=A.values()), "q must be a nested tensor .* got a torch.float64 tensor"),
    (lambda: attend(v=A.transpose(1, 2)), r"v must be a nested tensor \[B, j, heads, width\]"),
    (lambda: attend(HOLES, HOLES, HOLES), "q must be .* without holes between its sequences"),
    (lambda: attend(v=B), "k and v must have the same offsets"),
    (lambda: attend(q=nested((2, 2, 1), 2, 8)[0]), "q has B=3 but k has B=2"),
    (lambda: attend(k=nested((2, 3), 2, 4)[0]), "k has D=4 but q has D=8"),
    (lambda: attend(q=nested((2, 3), 3, 8)[0]), "heads must be a multiple of kv_heads"),
    (lambda: attend(block_mask=masks.causal), "block_mask must be a BlockMask, as jagged_"),
    (lambda: attend(A, A, A, masks.causal, block_mask=FULL), "block_mask must be .* without mask_"),
    (
        lambda: attend(block_mask=masks.jagged_block_mask(None, torch.tensor([0, 4]))),
        r"block_mask must be of 5 queries and 5 keys, .* \(1, 1, 4, 4\)",
    ),
    (
        lambda: masks.create_fine_mask(4, 2)(torch.zeros(1, 1, 5, 1).long()),
        "selected_block_indices",
    ),
    (lambda: masks.block_mask_of(twice, 4, 4, CPU), "what mask_mod returns must be bool on cpu"),
    (lambda: masks.dense_attention(ROW, ROW, ROW, mask_mod=twice), "what mask_mod returns must be"),
    (lambda: masks.alibi(4, torch.ones(3)), r"slopes must have shape \[4\], got \[3\]"),
    (lambda: masks.soft_cap(0), "cap must be a positive finite number of at least 1.2e-38, got 0"),
    (lambda: masks.relative_bias(torch.ones(4)), r"table must be floating, of shape \[heads, 2 m"),
    (lambda: masks.relative_bias(torch.ones(5).to(torch.float8_e4m3fn)), "table must be floating"),
    (lambda: masks.relative_bias([1.0]), r"table must be floating, .* got \[1.0\]"),
]


@pytest.mark.parametrize(("call", "told"), BAD)
def test_bad_arguments_are_named(call, told):
    with pytest.raises(ValueError, match=f"^{told}"):
        call()
