"""The benchmark of decoding on a CPU: it runs end to end, refuses what is wrong, counts the bytes
that a step must read, and draws the page that is committed."""

from __future__ import annotations

import dataclasses
import importlib.util
import json

import pytest
import torch

from benchmarks import attention, common, decode, decode_report, decode_step, report, sampling
from benchmarks.decode_step import Dense, Ours, Step
from benchmarks.oracle import WrongResult
from benchmarks.problem import Setting
from native_sparse_attention import native_sparse_attention

pytestmark = pytest.mark.usefixtures("nothing_to_release")

CPU = torch.device("cpu")
QUICK = ["--quick", "--device", "cpu", "--seconds", "1e-4"]
SMALL = Step(attention.tiny(320, 4, 2), B=2, T=2)


def check_rows(rows):
    names = {provider.name for provider in decode_step.PROVIDERS}
    assert {row["provider"] for row in rows if "failed" not in row} == names
    for row in rows:
        assert row["S"] == 320 and row["gpu"] and row["torch"] and row["date"]
        if "failed" in row:
            assert row["provider"] == "dense-flash" and row["T"] > 1 and "mask" in row["failed"]
            continue
        assert 0 < row["p20_us"] <= row["p50_us"] <= row["p80_us"] and row["error_share"] <= 1
        assert row["bytes"] > 0 and row["speedup_over_cudnn"] > 0
        assert (row["provider"] != decode.BASELINE) or row["speedup_over_cudnn"] == 1


def test_quick_form(tmp_path, capsys):
    path = tmp_path / "results" / "rows.jsonl"
    rows = decode.main([*QUICK, "--new", "1", "2", "--out", str(path)])
    assert common.read_rows(path) == json.loads(json.dumps(rows))
    assert len(capsys.readouterr().out.splitlines()) == len(rows) == 4 * len(decode_step.PROVIDERS)
    check_rows(rows)


def test_a_size_is_a_multiple_of_a_block():
    with pytest.raises(SystemExit, match="multiples of 16, got 100"):
        decode.main(["--device", "cpu", "--lengths", "100"])


# what is refused


def prepared(provider, step=SMALL):
    x = decode_step.draw(step, CPU)
    provider.prepare(x, step)
    return x


@pytest.mark.parametrize("change", ["scaled", "other blocks", "one block less", "a token late"])
def test_wrong_results_are_not_timed(monkeypatch, change):
    right = decode_step.decode.decode_attention

    def wrong(**settings):
        if change == "other blocks":
            settings["compress_block_size"] = 4
            settings["importance"] = "probs"
        if change == "one block less":
            settings["num_selected_blocks"] -= 1
        if change == "a token late":
            settings["lengths"] = settings["lengths"] - 1
        return right(**settings) * (1.001 if change == "scaled" else 1)

    monkeypatch.setattr(decode_step.decode, "decode_attention", wrong)
    with pytest.raises(WrongResult):
        decode.check(Ours("ours", "logits"), SMALL, CPU)
    with pytest.raises(SystemExit, match="ours not timed in 2 cases, the first: ours .* wrong"):
        decode.main([*QUICK, "--providers", "ours"])


def test_wrong_dense_attention_is_not_timed():
    class Unmasked(Dense):
        def prepare(self, x, step):
            super().prepare(x, step)
            x["mask"] = torch.zeros_like(x["mask"])

    dense, kernels = decode_step.PROVIDERS[0], decode_step.PROVIDERS[0].kernels
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
    x = decode_step.draw(SMALL, CPU)
    for name in ("k", "v", "ck", "cv"):
        assert x[name].transpose(1, 2).is_contiguous()
    assert x["ck"].shape == (2, 80, 2, 16) and x["lengths"].tolist() == [318, 318]
    torch.testing.assert_close(x["cv"][1, 3], x["v"][1, 8:16].mean(0))


def test_bytes_by_hand():
    """s=16, n=3, 1 initial and 2 local blocks, a window of 32 keys, d=4, fp32."""
    setting = attention.tiny(320, 4, 2)
    one, two = Step(setting, 1), Step(setting, 5, T=2)
    # the query at 319: keys 288 .. 319, which are the local blocks too, 3 blocks, the initial one
    assert decode_step.tokens_read(one) == 32 + 3 * 16 + 16
    # and 318: its window begins at 287; 6 blocks
    assert decode_step.tokens_read(two) == 33 + 6 * 16 + 16
    # query and output of 4 heads; 79 windows end before the query
    assert Ours("", "logits").bytes(one) == 4 * 16 * (2 * 4 + 2 * 2 * (96 + 79))
    assert Dense("", None, as_rows=True).bytes(two) == 5 * 4 * 16 * (2 * 2 * 4 + 2 * 2 * 320)
    # few tokens: the local blocks are all there is
    assert decode_step.tokens_read(Step(dataclasses.replace(setting, T=32), 1)) == 32
    # what the project decodes
    project = Step(Setting(65536), 16)
    assert decode_step.tokens_read(project) == 512 + 13 * 64 + 64
    dense, ours = (p.bytes(project) for p in (decode_step.PROVIDERS[0], decode_step.PROVIDERS[2]))
    assert 11 < dense / ours < 12
    assert decode_step.memory(project) > 3 * dense / 2


# the page


def made_up(provider, S, us, speedup=None, **changes):
    row = dict(provider=provider, B=16, S=S, T=1, H=64, K=4, p50_us=us, gbps=1234.0, gpu="G")
    row |= dict(driver="1", torch="2", triton="3", commit="c")
    row |= {} if speedup is None else {"speedup_over_cudnn": speedup}
    return {**row, **changes}


def test_table(tmp_path, monkeypatch):
    rows = [made_up("dense-cudnn", 8192, 80.0, 1.0), made_up("dense-cudnn", 65536, 480.0, 1.0)]
    rows += [made_up("ours", 8192, 40.0, 2.0), made_up("ours", 65536, 80.0, 6.0)]
    rows += [made_up("ours-probs", 8192, 100.0, 0.8)]
    text = decode_report.table([made_up("ours", 8192, 7.0, 9.0, gpu="another"), *rows])
    assert "B=16, H=64, K=4, T=1:" in text and "9.00" not in text
    assert "| dense-cudnn | 80.0; 1234 | 480; 1234 |" in text
    assert "| ours | 40.0 (2.00); 1234 | 80.0 (6.00); 1234 |" in text
    assert "| *target* | (1.50) | (7.00) |" in text
    assert "ours, B=16, H=64, K=4, T=1, S=64k: 6.00, target 7.00" in text
    assert "ours-probs, B=16, H=64, K=4, T=1, S=8k: 0.80, slower than dense" in text
    assert text.count("\n* ") == 2 and "decode.png" in text
    assert text.endswith("G, driver 1, torch 2, triton 3, commit c.")
    # the latest row counts, a failure too
    failed = {k: v for k, v in rows[3].items() if k not in ("p50_us", "speedup_over_cudnn")}
    text = decode_report.table([*rows, {**failed, "failed": "out of memory"}])
    assert "6.00" not in text and "out of memory (B x S = 16 x 64k)" in text
    assert decode_report.table([*rows, failed, *rows]) == decode_report.table(rows)
    monkeypatch.setattr(decode_report, "PLOT", tmp_path / "decode.png")
    more = [made_up("ours", 8192, 3.0, B=1), made_up("ours", 8192, 3.0, T=2)]
    steps = decode_report.Steps(rows + more)
    assert decode_report.pictured(steps) == [((64, 4, 1), 1), ((64, 4, 1), 16)]
    decode_report.plot(steps)
    assert (tmp_path / "decode.png").stat().st_size > 0


def sample(provider, batch, **fields):
    where = dict(gpu="G", driver="1", torch="2", triton="3", commit="c")
    return {"provider": provider, "batch": batch, **where, **fields}


def test_table_of_sampling():
    rows = [sample("nsa-pytorch", 1, tokens_per_s=50.0, over_published=1.0)]
    rows += [sample("nsa-pytorch", 16, failed="out | of memory")]
    rows += [sample("ours", 1, tokens_per_s=200.4, over_published=4.008)]
    text = decode_report.sampling_table(rows)
    assert "| nsa-pytorch | 50 | out / of memory |" in text and "| ours | 200 (4.01) |  |" in text


def test_page_is_drawn_from_the_rows(tmp_path, monkeypatch):
    """Where this fails: `python -m benchmarks.decode --table`."""
    page = report.PAGE.read_text(encoding="utf-8")
    rows = [common.read_rows(path) for path in (decode.RESULTS, sampling.RESULTS)]
    assert decode_report.render(page, *rows) == page
    copied = tmp_path / "performance.md"
    copied.write_text(page, encoding="utf-8")
    monkeypatch.setattr(decode_report, "PAGE", copied)
    monkeypatch.setattr(decode_report, "PLOT", tmp_path / "decode.png")
    path = tmp_path / "rows.jsonl"
    common.append_row(path, made_up("ours", 8192, 40.0, 2.0))
    decode.main(["--table", "--out", str(path)])
    drawn = copied.read_text(encoding="utf-8")
    assert "| ours | 40.0 (2.00); 1234 |" in drawn and (tmp_path / "decode.png").exists()
    monkeypatch.undo()
    assert decode_report.render(drawn, *rows) == page
    assert decode_report.table([]) == decode_report.NO_ROWS
    assert decode_report.sampling_table([]) == decode_report.NO_SAMPLES


# sampling


@pytest.mark.slow
def test_sampling(tmp_path, capsys):
    path = tmp_path / "rows.jsonl"
    rows = decode.main([*QUICK, "--sampling", "--out", str(path)])
    assert common.read_rows(path) == json.loads(json.dumps(rows))
    assert len(capsys.readouterr().out.splitlines()) == len(rows) == 2
    there = importlib.util.find_spec("native_sparse_attention_pytorch") is not None
    # it makes masks on the GPU where there is one, whatever device it is on
    there &= not torch.cuda.is_available()
    for row in rows:
        failed = row.get("failed")
        assert bool(failed) == (row["provider"] == sampling.PEER and not there), failed
        assert "failed" in row or row["tokens_per_s"] > 0
        assert ("over_published" in row) == there


def test_another_text_is_not_timed():
    class Wrong:
        def sample(self, prompt, length, temperature, use_cache_kv):
            return prompt + use_cache_kv

    with pytest.raises(WrongResult, match="differs from the one without"):
        sampling.check(Wrong(), CPU)
