"""What `nsa_cost` counts, against layers, caches, drawn masks and the benchmarks' own counts; and
the calculator's script against it."""

import dataclasses
import itertools
import json
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from benchmarks import problem
from benchmarks.providers import our_branches
from native_sparse_attention import KVCache, NSAConfig, SparseAttention, blocks, nsa_cost
from native_sparse_attention.compress import AttentionPool, MeanPool
from native_sparse_attention.cost import keys_read
from native_sparse_attention.ops import reference
from native_sparse_attention.ops.call import Call
from native_sparse_attention.presets import PRESETS
from tests.helpers.sizes import sizes

SETTINGS = sizes(
    8, 4, 8, n=2, w=5, dim=48, dim_head=16, heads=4, kv_heads=2, causal=True, num_initial_blocks=0,
    num_local_blocks=1,
)  # fmt: skip
CONFIG, ONE_SOFTMAX = NSAConfig(**SETTINGS), "one-softmax"
SHAPE = dict(dim=4096, dim_head=128, heads=32, kv_heads=8, causal=True)
PAPER = SHAPE | sizes(32, 16, 64, n=13, w=511, num_initial_blocks=1, num_local_blocks=2)
VARIED = {
    "plain": {},
    "forced": dict(num_initial_blocks=1, num_local_blocks=2, num_compressed_mem_kv=0),
    "independent": dict(branch_kv="independent", norm=False, attention_sinks=True, qkv_bias=True),
    "shared rankings": dict(
        selection_stride=4, query_heads_share_selected_kv=False, num_local_blocks=0
    ),
    "large stride": sizes(16, 16, num_initial_blocks=2),
    "probs": dict(importance="probs", kv_heads=4, compress_mlp_expand_factor=0.3),
}
ONE = dict(branches=("selected",), rank_rotated=True)
TOKENS = sizes(1, 1)
HELD = {
    "one softmax": (ONE, "ck k v"),
    "tokens": (ONE | TOKENS, "k v"),
    "no positions": (ONE | dict(dim_head=15), "ck k v"),
    "no ranks": (ONE | dict(num_selected_blocks=0), "k v"),
    "learned": (ONE | TOKENS | dict(importance="index", index_dim=20), "ck k v"),
    **{name: (settings, None) for name, settings in VARIED.items()},
}


@pytest.mark.parametrize("name", HELD)
def test_parameters_and_cache(name):
    """One softmax has no compressed values, and no keys twice where single rotated keys rank."""
    settings, streams = HELD[name]
    config = dataclasses.replace(CONFIG, **settings)
    for network in (None, MeanPool(), AttentionPool(16, 8)):
        if network is not None and (streams or config.compress_block_size != 8):
            continue
        layer = SparseAttention.from_config(config, compress_mlp=network, rotary_emb=False)
        cost = nsa_cost(config, 29, batch=2, dtype=torch.float32, compress_mlp=network).sparse
        assert cost.parameters == sum(p.numel() for p in layer.parameters())
        cache = KVCache(max_length=29)
        with torch.no_grad():
            layer(torch.randn(2, 29, 48), cache=cache)
        held = {n: size for n, size in cache.memory().items() if n[:4] not in ("tail", "leng")}
        assert cost.cache_bytes == sum(held.values()), held
        assert streams in (None, " ".join(sorted(held)))


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("name", VARIED)
def test_keys_that_queries_see(name, causal):
    """By the specification's masks, with a ranking that fills every slot that it can: scores are
    equal, of which the earlier blocks win."""
    config = dataclasses.replace(CONFIG, **VARIED[name], causal=causal)
    T, s, d = 41, config.selection_block_size, config.compress_block_sliding_stride
    q = torch.zeros(1, T, config.heads, 16)
    ck = torch.zeros(1, blocks.num_windows(T, d, causal=causal), config.kv_heads, 16)
    ranked = reference.select_blocks(Call(q, ck=ck, q_offset=0, seq_len=T), config)[0, :, 0]
    i, c = torch.arange(T), torch.arange(-(-T // s))
    forced = reference.forced_blocks(i[None], c, config)[0]
    chosen = forced | (ranked[..., None] == c).any(1)
    behind = i[:, None] - i
    seen = chosen.repeat_interleave(s, 1)[:, :T] & ((behind >= 0) | (not causal))
    near = (behind <= 5) & (behind >= (0 if causal else -5))
    windows = i // d if causal else -(-T // d)
    expected = seen.sum(1) + near.sum(1) + windows + config.num_compressed_mem_kv
    assert torch.equal(keys_read(i, T, config), expected)


def test_operations_against_the_benchmarks():
    """At the paper's sizes, where the first blocks leave slots empty, to one part in a hundred: two
    products for each key that a branch shows, and one of each KV head for a window that ranks."""
    setting = problem.Setting(T=65536, H=32, K=8)
    config = NSAConfig(**PAPER, num_compressed_mem_kv=0)
    costs = nsa_cost(config, 65536, compress_mlp=MeanPool())
    i = torch.arange(65536)
    counted = 4 * 128 * 32 * sum(int(b.count(i).sum()) for b in our_branches(setting))
    counted += 2 * 128 * 8 * int((i // 16).sum())
    assert costs.sparse.attention_flops == pytest.approx(counted, rel=1e-2)
    assert costs.dense.attention_flops == 4 * 128 * 32 * (65536 * 65537 // 2)
    products = 4096 * (2 * 32 + 2 * 8) * 128
    assert costs.dense.flops - costs.dense.attention_flops == 2 * 65536 * products
    gate = 2 * 65536 * 4096 * 3 * 32
    rest = costs.sparse.flops - costs.sparse.attention_flops
    assert rest == 2 * 65536 * products + gate
    assert costs.dense.cache_bytes == 65536 * 2 * 8 * 128 * 2
    assert costs.sparse.step_bytes < costs.dense.step_bytes / 2


@pytest.mark.parametrize("T", [64, 97])
@pytest.mark.parametrize(("name", "stride"), [*((name, 1) for name in PRESETS), (ONE_SOFTMAX, 4)])
def test_presets_against_torch(name, stride, T):
    """At `dense_length` and above. SDPA counts the upper triangle too, eager PyTorch tiles."""
    few = dict(dense_length=64, num_selected_blocks=1, num_initial_blocks=0, num_local_blocks=1)
    few |= dict(selection_stride=stride)
    shape, few = dict(dim=48, dim_head=16, heads=4, kv_heads=2), few if name == ONE_SOFTMAX else {}
    config = NSAConfig.preset(name, 1024, causal=True, **shape, **few)
    layer = SparseAttention.from_config(config)
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH), torch.no_grad():
        layer(torch.randn(1, T, 48))
    cost = nsa_cost(config, T)
    attention = counter.get_flop_counts()["Global"][torch.ops.aten.bmm]
    projected = counter.get_total_flops() - attention
    assert projected == cost.sparse.flops - cost.sparse.attention_flops
    is_dense = name == ONE_SOFTMAX and T == 64
    assert (cost.sparse.attention_flops == cost.dense.attention_flops) == is_dense
    assert (cost.sparse.attention_flops * 2 * T == attention * (T + 1)) == is_dense


SCRIPT = Path(__file__).resolve().parent.parent / "docs" / "cost.js"
GIVEN = [
    *(settings for settings, _ in HELD.values()),
    dict(num_selected_blocks=0, out_bias=True, qk_norm=True),
    dict(branches=["compressed", "window"], branch_kv="independent"),
    dict(branches=["window"]),
    dict(branches=["selected"], importance="max", dense_length=20, num_local_blocks=3),
    dict(branches=["selected"], dense_length=20, use_diff_topk=True),
    dict(branches=["selected"], dense_length=20, selection_stride=4),
    dict(branches=["selected", "window"], importance="index", index_dim=8, index_heads=2),
]
# settings of NSAConfig that no count depends on
WITHOUT_COST = {
    "backend", "block_sizes", "index_pool", "interpolated_importance_score", "qk_norm_eps",
    "ranking_bits", "recompute", "scale", "soft_cap",
}  # fmt: skip
GRID = [
    (settings | dict(causal=causal), T, mean)
    for settings, causal, T, mean in itertools.product(
        GIVEN, (True, False), (1, 8, 41), (False, True)
    )
] + [(PAPER, 65536, False)]  # counts that 32 bits cannot hold
STAGES = dict(
    branches=["selected"], rank_rotated=True, causal=True, num_local_blocks=4, num_selected_groups=2
)
GRID += [(STAGES, T, False) for T in (31, 300)]


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
        dict(branches=["selected"], rank_rotated=True, num_selected_groups=1, num_local_blocks=3),
    ],
    ids=str,
)
def test_form_refuses_what_the_config_refuses(settings):
    try:
        NSAConfig(**SETTINGS | settings)
        refused = False
    except ValueError:
        refused = True
    call = f"costErrors({{...COST_DEFAULTS, ...{json.dumps(SETTINGS | settings)}}})"
    assert bool(evaluate(call)) == refused


def test_counts_what_nsa_cost_counts():
    calls = ",".join(
        f"nsaCost({json.dumps(SETTINGS | settings | dict(mean=mean))}, {T}, 3, 4)"
        for settings, T, mean in GRID
    )
    for (settings, T, mean), found in zip(GRID, evaluate(f"[{calls}]"), strict=True):
        network = MeanPool() if mean and settings.get("importance") != "index" else None
        config = NSAConfig(**SETTINGS | settings)
        expected = nsa_cost(config, T, batch=3, dtype=torch.float32, compress_mlp=network)
        for name in ("sparse", "dense"):
            assert found[name] == dataclasses.asdict(getattr(expected, name)), (settings, T, mean)
