"""The benchmark of decoding refuses what is wrong, and counts the bytes that a step must read."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from benchmarks import attention, decode
from benchmarks.decode import Dense, Ours, Step
from benchmarks.oracle import WrongResult
from benchmarks.problem import Setting
from native_sparse_attention import native_sparse_attention

pytestmark = pytest.mark.usefixtures("nothing_to_release")

CPU = torch.device("cpu")
QUICK = ["--quick", "--device", "cpu", "--seconds", "1e-4"]
SMALL = Step(attention.tiny(320, 4, 2), B=2, T=2)


@pytest.mark.parametrize("change", ["scaled", "other blocks", "one block less", "a token late"])
def test_wrong_results_are_not_timed(monkeypatch, change):
    right = decode.decode_attention

    def wrong(q, **settings):
        if change == "other blocks":
            settings["compress_block_size"] = 4
            settings["importance"] = "probs"
        if change == "one block less":
            settings["num_selected_blocks"] -= 1
        if change == "a token late":
            settings["lengths"] = settings["lengths"] - 1
        return right(q, **settings) * (1.001 if change == "scaled" else 1)

    monkeypatch.setattr(decode, "decode_attention", wrong)
    with pytest.raises(WrongResult):
        decode.check(Ours("ours", "logits"), SMALL, CPU)
    with pytest.raises(SystemExit, match="2 cases failed, the first: ours .* wrong"):
        decode.main([*QUICK, "--providers", "ours"])


def test_wrong_dense_attention_is_not_timed():
    class Unmasked(Dense):
        def prepare(self, x, step):
            super().prepare(x, step)
            x["mask"] = torch.zeros_like(x["mask"])

    decode.check(decode.PROVIDERS[0], SMALL, CPU)
    with pytest.raises(WrongResult, match="out errs by"):
        decode.check(Unmasked("wrong"), SMALL, CPU)


def test_selected_blocks_are_read_off_the_output():
    """More blocks than a head is wide, so several calls."""
    ours, c = Ours("ours", "logits"), SMALL.setting
    x = decode.draw(SMALL, CPU)
    ours.prepare(x, SMALL)
    found = decode.block_indices(decode.selected(ours, x, SMALL), SMALL)
    inputs = [x[name] for name in ("q", "k", "v", "ck", "cv", "branch_gates")]
    options = dict(q_offset=x["lengths"].long(), sliding_window_size=c.w, return_indices=True)
    _, indices = native_sparse_attention(*inputs, **options, **c.ranking)
    assert c.T // c.s > c.D and torch.equal(found, indices.sort(-1).values)
    out = ours.call(x, SMALL)
    queries = [(b, t) for b in range(2) for t in range(2)]
    assert decode.verify(ours, x, SMALL, out, queries) <= 1
    uneven = torch.zeros(2, 2, 4, 20, dtype=torch.bool)
    uneven[0, 0, 0, 5] = True
    with pytest.raises(WrongResult, match="heads of a group"):
        decode.block_indices(uneven, SMALL)


def test_bytes_by_hand():
    """s=16, n=3, 1 initial and 2 local blocks, a window of 32 keys, d=4, fp32."""
    setting = attention.tiny(320, 4, 2)
    one, two = Step(setting, 1), Step(setting, 5, T=2)
    # the query at 319: keys 288 .. 319, which are the local blocks too, 3 blocks, the initial one
    assert decode.tokens_read(one) == 32 + 3 * 16 + 16
    # and 318: its window begins at 287; 6 blocks
    assert decode.tokens_read(two) == 33 + 6 * 16 + 16
    # query and output of 4 heads; 79 windows end before the query
    assert Ours("", "logits").bytes(one) == 4 * 16 * (2 * 4 + 2 * 2 * (96 + 79))
    assert Dense("").bytes(two) == 5 * 4 * 16 * (2 * 2 * 4 + 2 * 2 * 320)
    # few tokens: the local blocks are all there is
    assert decode.tokens_read(Step(dataclasses.replace(setting, T=32), 1)) == 32
    # what the project decodes
    project = Step(Setting(65536), 16)
    assert decode.tokens_read(project) == 512 + 13 * 64 + 64
    dense, ours = (p.bytes(project) for p in (decode.PROVIDERS[0], decode.PROVIDERS[1]))
    assert 11 < dense / ours < 12
