"""What the page of times says was not run."""

from benchmarks import gaps
from benchmarks.cases import PASSES, Rows


def made_up(provider, T, **fields):
    row = dict(provider=provider, part="whole", T=T, H=64, K=4, selection_stride=1, gpu="G")
    return [{**row, **fields, "pass": name} for name in PASSES]


def test_what_was_not_run_is_told():
    small = {"H": 32, "K": 8}
    rows = made_up("ours", 8192) + made_up("dense-cudnn", 4096)
    rows += made_up("ours", 8192, selection_stride=4)
    rows += [{**row, **small} for row in rows]
    rows += made_up("nsa-pytorch", 8192, part="selected")
    told = gaps.not_run(Rows(rows)).splitlines()
    assert "* H/K = 64/4, 32/8, 4k: ours (`selection_stride` 1, 4)" in told
    assert any(line.startswith("* H/K = 64/4, 32/8, 8k: dense-cudnn") for line in told)
    every = next(line for line in told if line.startswith("* H/K = 64/4, 32/8, all lengths: "))
    assert "flex-dense; ours-probs (`selection_stride` 1, 4); ours-large" in every
    assert "window, flex" in every and "fla" not in every.replace("flash", "")
    # of its lengths, those of parts, 64/4 has all
    assert "* H/K = 32/8, all lengths: selected, nsa-pytorch" in told
    groups = "fla.ops.nsa takes groups of 16 heads and more, powers of two, not 4"
    assert f"* H/K = 32/8, all lengths ({groups}): fla" in told
    assert "* H/K = 64/4, all lengths: fla" in told and "dense-sdpa" not in "".join(told)
    everything = gaps.plan(Rows(rows))
    rows = [
        row
        for _, (heads, provider, part, stride, alike) in everything
        for T in (4096, 8192)
        for row in made_up(
            provider, T, part=part, H=heads[0], K=heads[1], selection_stride=stride,
            **({} if alike is None else {"alike": alike}),
        )
    ]  # fmt: skip
    assert gaps.not_run(Rows(rows)) == "none"
