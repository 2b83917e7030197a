"""The benchmark of decoding on a CPU: it runs end to end, refuses what is wrong, counts the bytes
that a step must read, and draws the page that is committed."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch

from benchmarks import attention, common, decode
from benchmarks.decode import Dense, Ours, Step
from benchmarks.oracle import WrongResult
from benchmarks.problem import Setting
from native_sparse_attention import native_sparse_attention

pytestmark = pytest.mark.usefixtures("nothing_to_release")

CPU = torch.device("cpu")
QUICK = ["--quick", "--device", "cpu", "--seconds", "1e-4"]
SMALL = Step(attention.tiny(320, 4, 2), B=2, T=2)


def check_rows(rows):
    names = {provider.name for provider in decode.PROVIDERS}
    assert {row["provider"] for row in rows if "failed" not in row} == names
    for row in rows:
        assert row["S"] == 320 and row["gpu"] and row["torch"] and row["date"]
        if "failed" in row:
            assert row["provider"] == "dense-flash" and row["T"] > 1 and "mask" in row["failed"]
            continue
        assert 0 < row["p20_us"] <= row["p50_us"] <= row["p80_us"] and row["error_share"] <= 1
        assert row["bytes"] > 0 and row["speedup_over_cudnn"] >= 0
        assert (row["provider"] != decode.BASELINE) or row["speedup_over_cudnn"] == 1


def test_quick_form(tmp_path, capsys):
    path = tmp_path / "results" / "rows.jsonl"
    rows = decode.main([*QUICK, "--new", "1", "2", "--out", str(path)])
    assert common.read_rows(path) == json.loads(json.dumps(rows))
    assert len(capsys.readouterr().out.splitlines()) == len(rows) == 4 * len(decode.PROVIDERS)
    check_rows(rows)


def test_a_size_is_a_multiple_of_a_block():
    with pytest.raises(SystemExit, match="multiples of 16, got 100"):
        decode.main(["--device", "cpu", "--lengths", "100"])


# what is refused


def prepared(provider, step=SMALL):
    x = decode.draw(step, CPU)
    provider.prepare(x, step)
    return x


@pytest.mark.parametrize("change", ["scaled", "other blocks", "one block less", "a token late"])
def test_wrong_results_are_not_timed(monkeypatch, change):
    right = decode.decode_attention

    def wrong(**settings):
        if change == "other blocks":
            settings["compress_block_size"] = 4
            settings["importance"] = "probs"
        if change == "one block less":
            settings["num_selected_blocks"] -= 1
        if change == "a token late":
            settings["lengths"] = settings["lengths"] - 1
        return right(**settings) * (1.001 if change == "scaled" else 1)

    monkeypatch.setattr(decode, "decode_attention", wrong)
    with pytest.raises(WrongResult):
        decode.check(Ours("ours", "logits"), SMALL, CPU)
    with pytest.raises(SystemExit, match="ours not timed in 2 cases, the first: ours .* wrong"):
        decode.main([*QUICK, "--providers", "ours"])


def test_wrong_dense_attention_is_not_timed():
    class Unmasked(Dense):
        def prepare(self, x, step):
            super().prepare(x, step)
            x["mask"] = torch.zeros_like(x["mask"])

    dense, kernels = decode.PROVIDERS[0], decode.PROVIDERS[0].kernels
    decode.check(dense, SMALL, CPU)
    with pytest.raises(WrongResult, match="out errs by"):
        decode.check(Unmasked("wrong", kernels, as_rows=False), SMALL, CPU)


def test_selected_blocks_are_read_off_the_output():
    """More blocks than a head is wide, so several calls."""
    ours, c = Ours("ours", "logits"), SMALL.setting
    x = prepared(ours)
    found = decode.lists(decode.selected(ours, x, SMALL), SMALL)
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
        decode.lists(uneven, SMALL)


# inputs and bytes


def test_inputs_are_views_of_storage_as_a_cache_has_it():
    x = decode.draw(SMALL, CPU)
    for name in ("k", "v", "ck", "cv"):
        assert x[name].transpose(1, 2).is_contiguous()
    assert x["ck"].shape == (2, 80, 2, 16) and x["lengths"].tolist() == [318, 318]
    torch.testing.assert_close(x["cv"][1, 3], x["v"][1, 8:16].mean(0))


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
    assert Dense("", None, as_rows=True).bytes(two) == 5 * 4 * 16 * (2 * 2 * 4 + 2 * 2 * 320)
    # few tokens: the local blocks are all there is
    assert decode.tokens_read(Step(dataclasses.replace(setting, T=32), 1)) == 32
    # what the project decodes
    project = Step(Setting(65536), 16)
    assert decode.tokens_read(project) == 512 + 13 * 64 + 64
    dense, ours = (p.bytes(project) for p in (decode.PROVIDERS[0], decode.PROVIDERS[2]))
    assert 11 < dense / ours < 12
    assert decode.memory(project) > 3 * dense / 2


# the page


def made_up(provider, S, us, speedup=None, **changes):
    row = dict(provider=provider, B=16, S=S, T=1, H=64, K=4, p50_us=us, gbps=1234.0, gpu="G")
    row |= dict(driver="1", torch="2", triton="3", commit="c")
    row |= {} if speedup is None else {"speedup_over_cudnn": speedup}
    return {**row, **changes}


def test_table():
    rows = [made_up("dense-cudnn", 8192, 80.0, 1.0), made_up("dense-cudnn", 65536, 480.0, 1.0)]
    rows += [made_up("ours", 8192, 40.0, 2.0), made_up("ours", 65536, 80.0, 6.0)]
    text = decode.table([made_up("ours", 8192, 7.0, 9.0, gpu="another"), *rows])
    assert "B=16, H=64, K=4, T=1:" in text and "9.00" not in text
    assert "| dense-cudnn | 80.0; 1234 | 480; 1234 |" in text
    assert "| ours | 40.0 (2.00); 1234 | 80.0 (6.00); 1234 |" in text and "decode.png" in text
    assert text.endswith("G, driver 1, torch 2, triton 3, commit c.")
    # the latest row counts, a failure too
    failed = {k: v for k, v in rows[3].items() if k not in ("p50_us", "speedup_over_cudnn")}
    assert "6.00" not in decode.table([*rows, {**failed, "failed": "out of memory"}])
    assert decode.table([*rows, failed, *rows]) == decode.table(rows)
    more = [made_up("ours", 8192, 3.0, B=1), made_up("ours", 8192, 3.0, T=2)]
    steps = decode.Steps(rows + more)
    assert decode.pictured(steps) == [((64, 4, 1), 1), ((64, 4, 1), 16)]
