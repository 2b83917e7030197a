"""The script of the cost calculator against `nsa_cost`."""

import dataclasses
import itertools
import json
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from native_sparse_attention import NSAConfig, nsa_cost
from native_sparse_attention.compress import MeanPool

SCRIPT = Path(__file__).resolve().parent.parent / "docs" / "cost.js"
CONFIG = dict(
    dim=48, dim_head=16, heads=4, kv_heads=2, sliding_window_size=5, compress_block_size=8,
    compress_block_sliding_stride=4, selection_block_size=8, num_selected_blocks=2, causal=True,
    num_initial_blocks=0, num_local_blocks=1,
)  # fmt: skip
VARIED = [
    {},
    dict(num_initial_blocks=1, num_local_blocks=2, num_compressed_mem_kv=0),
    dict(branch_kv="independent", norm=False, attention_sinks=True, qkv_bias=True),
    dict(selection_stride=4, query_heads_share_selected_kv=False, num_local_blocks=0),
    dict(compress_block_size=16, compress_block_sliding_stride=16, num_initial_blocks=2),
    dict(importance="probs", kv_heads=4, compress_mlp_expand_factor=0.3),
    dict(num_selected_blocks=0, out_bias=True, qk_norm=True),
    dict(branches=["compressed", "window"], branch_kv="independent"),
    dict(branches=["window"]),
    dict(branches=["selected"], importance="max", dense_length=20, num_local_blocks=3),
    dict(branches=["selected", "window"], importance="index", index_dim=8, index_heads=2),
    dict(
        branches=["selected"], rank_rotated=True, compress_block_size=1,
        compress_block_sliding_stride=1,
    ),
]  # fmt: skip
# settings of NSAConfig that no count depends on
WITHOUT_COST = {
    "backend", "block_sizes", "index_pool", "interpolated_importance_score", "qk_norm_eps",
    "recompute", "scale", "soft_cap", "use_diff_topk",
}  # fmt: skip
GRID = [
    (settings | dict(causal=causal), T, mean)
    for settings, causal, T, mean in itertools.product(
        VARIED, (True, False), (1, 8, 41), (False, True)
    )
] + [(dict(selection_block_size=64, compress_block_size=32, num_selected_blocks=13), 4099, False)]


def evaluate(expression: str):
    """The value of an expression in JavaScript that uses the script's functions."""
    if node := shutil.which("node"):
        code = f"Object.assign(globalThis, require({json.dumps(str(SCRIPT))}));"
        code += f"console.log(JSON.stringify({expression}))"
        done = subprocess.run([node, "-"], input=code, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)
    quickjs = pytest.importorskip("quickjs", reason="needs node or the package quickjs")
    context = quickjs.Context()
    context.eval(SCRIPT.read_text(encoding="utf-8"))
    return json.loads(context.eval(f"JSON.stringify({expression})"))


def test_script_knows_every_setting():
    names = {field.name for field in dataclasses.fields(NSAConfig)}
    assert names - WITHOUT_COST == set(evaluate("Object.keys(COST_DEFAULTS)")) - {"mean"}


PRESETS = ("one-softmax", "short-windows", "paper", "published")
SHAPE = dict(dim=4096, dim_head=128, heads=32, kv_heads=8, causal=True)


@pytest.mark.parametrize("preset", PRESETS)
def test_form_can_describe_every_preset(preset):
    """A setting with a cost is a field of the form, a choice of it, or what the form assumes."""
    fields = evaluate("COST_FIELDS.map((field) => field[0])")
    choices = evaluate("COST_CHOICES.map(([name, , values]) => [name, Object.values(values)])")
    assumed = {name: [value] for name, value in evaluate("COST_DEFAULTS").items()}
    settings = dataclasses.asdict(NSAConfig.preset(preset, 65536, **SHAPE))
    settings["branches"] = list(settings["branches"])
    assert settings["importance"] != "index"  # sizes of an index are no fields
    for name in settings.keys() - WITHOUT_COST - {*fields, "index_dim", "index_heads"}:
        assert settings[name] in (assumed | dict(choices))[name], name


@pytest.mark.parametrize(
    "settings",
    [
        *({}, dict(selection_stride=3), dict(compress_block_size=2), dict(kv_heads=3)),
        *(dict(selection_block_size=6), dict(dense_length=16), dict(rank_rotated=True)),
        dict(branches=["selected"], dense_length=16, rank_rotated=True),
        dict(branches=["selected"], dense_length=17, selection_stride=2),
    ],
    ids=str,
)
def test_form_refuses_what_the_config_refuses(settings):
    try:
        NSAConfig(**CONFIG | settings)
        refused = False
    except ValueError:
        refused = True
    call = f"costErrors({{...COST_DEFAULTS, ...{json.dumps(CONFIG | settings)}}})"
    assert bool(evaluate(call)) == refused


@pytest.mark.parametrize(
    ("T", "told"),
    [
        (64, "64 keys (dense) of 64"),
        (65, "17 keys (17 selected) of 65"),
        (63, "63 keys (dense) of 63"),
    ],
)
def test_form_tells_what_the_last_query_reads(T, told):
    settings = CONFIG | dict(branches=["selected"], dense_length=64)
    call = f"lastQuery({{...COST_DEFAULTS, ...{json.dumps(settings)}}}, {T})"
    assert evaluate(call) == f"The last query reads {told}."


def test_counts_what_nsa_cost_counts():
    calls = ",".join(
        f"nsaCost({json.dumps(CONFIG | settings | dict(mean=mean))}, {T}, 3, 4)"
        for settings, T, mean in GRID
    )
    for (settings, T, mean), found in zip(GRID, evaluate(f"[{calls}]"), strict=True):
        network = MeanPool() if mean and settings.get("importance") != "index" else None
        config = NSAConfig(**CONFIG | settings)
        expected = nsa_cost(config, T, batch=3, dtype=torch.float32, compress_mlp=network)
        for name in ("sparse", "dense"):
            assert found[name] == dataclasses.asdict(getattr(expected, name)), (settings, T, mean)


def test_starts_with_the_setting_of_the_paper():
    """The form's first values, at a length where numbers are too large for 32 bits."""
    found = evaluate("nsaCost({}, 65536)")
    config = NSAConfig(
        dim=4096, dim_head=128, heads=32, kv_heads=8, sliding_window_size=511,
        compress_block_sliding_stride=16, num_selected_blocks=13, num_initial_blocks=1,
        num_local_blocks=2, causal=True,
    )  # fmt: skip
    expected = nsa_cost(config, 65536)
    assert found["sparse"] == dataclasses.asdict(expected.sparse)
    assert found["dense"] == dataclasses.asdict(expected.dense)
