"""Prefill and decoding of a model of transformers: sparse attention against its own SDPA attention.

    python -m benchmarks.generation --model llama-8b --layers 8    append rows
    python -m benchmarks.generation --table       redraw results/generation.md from the rows
    python -m benchmarks.generation --quick       a tiny model, nothing recorded

A model has random weights in the shape of a published one (`--layers` cuts its depth). Prompts are
random tokens without padding, in bf16. All forms of attention share the weights and take turns in
one process. They are SDPA; what `use_sparse_attention` gives by default; one softmax over 64
initial, 512 local and 512 ranked tokens in blocks of `--s`, ranked by the greatest logit (for a
group of heads, or for each head) or by means; and the model that `convert` makes, with a learned
ranking, or with its defaults.

* prefill: wall time of one forward over the prompt with a new `DynamicCache` and the logits of the
  last token. p50 of several after a first one.
* decode: greedy `generate`, with a `DynamicCache` (sparse forms a `SparseCache`), and of some forms
  with `cache_implementation="static"`, whose step transformers compiles on a GPU. Tokens/s of all
  sequences: the time of a call of `generate` less that of one of 8 new tokens.
* peak_mib: greatest memory of tensors during the timed call, weights included.

Nothing is timed of a form before its logits with all blocks selected agree with those of SDPA, in
fp32, in two layers of the model's widths: of a forward, of steps over either cache, and of
`generate` over a static cache where that is timed. The longest context and the largest batch come
first, so that memory that does not suffice is known at once.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from . import common
from .common import Row, WrongResult

PAGE = common.RESULTS / "generation.md"
# a released model's widths
SHAPES: dict[str, dict[str, Any]] = {
    "smollm2-135m": dict(
        num_hidden_layers=30, hidden_size=576, intermediate_size=1536, num_attention_heads=9,
        num_key_value_heads=3, head_dim=64, vocab_size=49152, tie_word_embeddings=True,
    ),
    "llama-8b": dict(
        num_hidden_layers=32, hidden_size=4096, intermediate_size=14336, num_attention_heads=32,
        num_key_value_heads=8, head_dim=128, vocab_size=128256,
    ),
    "llama-1b": dict(
        num_hidden_layers=16, hidden_size=2048, intermediate_size=8192, num_attention_heads=32,
        num_key_value_heads=8, head_dim=64, vocab_size=32000,
    ),
    "tiny": dict(
        num_hidden_layers=2, hidden_size=96, intermediate_size=128, num_attention_heads=6,
        num_key_value_heads=2, head_dim=16, vocab_size=256,
        initializer_range=0.3,  # attention that is not uniform
    ),
}  # fmt: skip
BASELINE = "sdpa"
# tokens of the blocks
INITIAL, LOCAL, RANKED = 64, 512, 512
# of `use_sparse_attention`
DEFAULT_SIZES = dict(selection_block_size=64, num_initial_blocks=1, num_local_blocks=8)
# new tokens of a call whose time is taken off
FIRST = 8
# of the check
CHECK_LAYERS, CHECK_STEPS = 2, 3
# of the root mean square of logits: products in tf32 have 11 bits, and errors grow over two layers
MOST_OFF = 2**-8
# graphs of all forms of a case, of one function of transformers
MOST_GRAPHS = 64


@dataclasses.dataclass(frozen=True)
class Form:
    """A way to attend. Without settings it is SDPA; `converted`: `convert` replaces the layers,
    otherwise `use_sparse_attention` changes how they attend; `static`: a static cache is timed,
    which takes a compilation."""

    name: str
    settings: dict[str, Any] | None = None
    converted: bool = False
    static: bool = False


@dataclasses.dataclass(frozen=True)
class Plan:
    name: str
    forms: tuple[Form, ...]
    contexts: tuple[int, ...]
    batches: tuple[int, ...]
    new_tokens: int = 64
    repeats: int = 3
    dtype: torch.dtype = torch.bfloat16

    def __post_init__(self) -> None:
        least = dict(contexts=2, batches=1, new_tokens=FIRST + 2)
        common.check_least(self, least)


def forms_of(sizes: Sequence[int], local: int = LOCAL, ranked: int = RANKED) -> tuple[Form, ...]:
    """All forms, with blocks of these sizes. Raises ValueError: a size that does not divide the
    tokens of the blocks."""
    forms = [Form(BASELINE, static=True)]
    for s in sizes:
        if s < 4 or any(tokens % s for tokens in (INITIAL, local, ranked)):
            raise ValueError(f"s must divide {INITIAL}, {local} and {ranked}, got {s}")
        blocks: dict[str, Any] = dict(
            selection_block_size=s, num_initial_blocks=INITIAL // s, num_local_blocks=local // s,
            num_selected_blocks=ranked // s, dense_length=0,
        )  # fmt: skip
        windows = dict(compress_block_size=s, compress_block_sliding_stride=s)
        by_head = dict(importance="max", query_heads_share_selected_kv=False)
        forms.append(Form(f"max of {s}", blocks | dict(importance="max"), static=True))
        forms.append(Form(f"means of {s}", blocks | windows | dict(importance="logits")))
        forms.append(Form(f"max of {s} by each head", blocks | by_head))
        forms.append(Form(f"converted, {s}", blocks | dict(importance="index"), converted=True))
    defaults = Form("defaults", {}, static=True), Form("converted, defaults", {}, converted=True)
    return (*forms, *defaults)


# models and caches


def build(config: Any, device: torch.device, dtype: torch.dtype) -> Any:
    """A model whose random weights are drawn on the device."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    with device:
        return AutoModelForCausalLM.from_config(config, dtype=dtype).eval()


def network_of(shape: str, layers: int | None, device: torch.device, dtype: torch.dtype) -> Any:
    """A Llama of random weights."""
    from transformers import LlamaConfig

    sizes = SHAPES[shape] | dict(bos_token_id=None, eos_token_id=None, pad_token_id=0)
    if layers is not None:
        sizes |= dict(num_hidden_layers=layers)
    return build(LlamaConfig(**sizes, max_position_embeddings=2**17), device, dtype)


def checked_network(network: Any) -> Any:
    """A model of the same widths with two layers of random weights, in fp32."""
    config = copy.deepcopy(network.config)
    config.num_hidden_layers = min(CHECK_LAYERS, config.num_hidden_layers)
    config.vocab_size = 512
    config.bos_token_id = config.eos_token_id = config.pad_token_id = None
    # queries and keys of such a size that attention is not uniform
    config.initializer_range = 1.5 * config.hidden_size**-0.5
    return build(config, network.device, torch.float32)


def under(form: Form, network: Any) -> Any:
    """A copy of the model with a form of attention, which shares its weights, but for converted
    layers."""
    from native_sparse_attention.hf import convert, use_sparse_attention

    shared = {id(t): t for t in (*network.parameters(), *network.buffers())}
    model = copy.deepcopy(network, shared)
    model.set_attn_implementation("sdpa")
    model.generation_config.eos_token_id = None  # no call ends early
    if form.settings is None:
        return model
    return (convert if form.converted else use_sparse_attention)(model, form.settings)


def new_cache(form: Form, model: Any) -> Any:
    from transformers import DynamicCache

    from native_sparse_attention.hf import SparseCache

    if form.settings is None or form.converted:
        return DynamicCache(config=model.config)
    return SparseCache(model.config)


def as_argument(cache: Any, model: Any) -> dict[str, Any]:
    """The cache by the name that this release of transformers has for it."""
    is_new = "cache" in inspect.signature(model.forward).parameters  # since 5.24
    return {"cache" if is_new else "past_key_values": cache}


def draw(model: Any, batch: int, context: int) -> Tensor:
    """Tokens [B T]."""
    generator = torch.Generator(model.device).manual_seed(0)
    most = model.config.vocab_size
    return torch.randint(most, (batch, context), device=model.device, generator=generator)


# the check


@torch.no_grad()
def check(form: Form, network: Any) -> float:
    """Error of logits with all blocks selected against SDPA, of a forward and of steps of decoding;
    where it is timed also of `generate` over a static cache, whose steps are compiled on a GPU.
    Raises WrongResult: more than rounding explains."""
    if form.settings is None:
        return 0.0
    sizes = DEFAULT_SIZES | form.settings
    s, settings = sizes["selection_block_size"], dict(form.settings, dense_length=0)
    # All blocks but that of the last queries are selected: with one more, SDPA would compute it.
    whole = (sizes["num_initial_blocks"] + sizes["num_local_blocks"] + 4) * s
    ids = draw(network, 2, whole + s // 2)
    dense = under(Form(BASELINE), network)
    exact = dense(ids, use_cache=False).logits

    def variant(**changes: Any) -> Any:
        return under(dataclasses.replace(form, settings=settings | changes), network)

    logits = variant(num_selected_blocks=4)(ids, use_cache=False).logits
    errors = [error_of(logits[:, :whole], exact[:, :whole])]
    # differentiable top-n, which a learned ranking has not, is never given to SDPA; steps of
    # decoding have the same kernels
    changes = dict(num_selected_blocks=5, use_diff_topk=True)
    model = variant(**changes, **(dict(importance="max") if form.converted else {}))
    start, cached = ids.shape[1] - CHECK_STEPS, as_argument(new_cache(form, model), model)
    model(ids[:, :start], **cached)
    steps = [model(ids[:, i : i + 1], **cached).logits for i in range(start, ids.shape[1])]
    errors.append(error_of(torch.cat(steps, dim=1), exact[:, start:]))
    if form.static:
        prompt = ids[:, :start]
        made = model.generate(
            prompt, attention_mask=torch.ones_like(prompt), do_sample=False, pad_token_id=0,
            max_new_tokens=CHECK_STEPS, output_logits=True, return_dict_in_generate=True,
            cache_implementation="static",
        )  # fmt: skip
        exact = dense(made.sequences, use_cache=False).logits[:, start - 1 : -1]
        errors.append(error_of(torch.stack(made.logits, dim=1), exact))
    off = max(errors)
    if not off <= MOST_OFF:
        raise WrongResult(f"logits with all blocks are {off:.1e} off SDPA's: {MOST_OFF:.1e}")
    return off


def error_of(logits: Tensor, exact: Tensor) -> float:
    return ((logits - exact).norm() / exact.norm()).item()


# times


def calls_of(form: Form, network: Any, ids: Tensor, plan: Plan) -> dict[str, Callable[[], Row]]:
    """By measure: ms of a prefill, or of a new token over a cache."""
    model, device, new = under(form, network), ids.device, plan.new_tokens
    mask = torch.ones_like(ids)

    @torch.no_grad()
    def prefill() -> Row:
        cached: Any = as_argument(new_cache(form, model), model)
        began = common.synchronize(device)
        model(ids, attention_mask=mask, logits_to_keep=1, **cached)
        return {"ms": 1e3 * (common.synchronize(device) - began)}

    def generate(count: int, kind: str) -> float:
        cached: dict[str, Any] = dict(cache_implementation="static")
        if kind == "dynamic":
            cached = as_argument(new_cache(form, model), model)
        began = common.synchronize(device)
        model.generate(
            ids, attention_mask=mask, do_sample=False, pad_token_id=0, max_new_tokens=count,
            min_new_tokens=count, **cached,
        )  # fmt: skip
        return common.synchronize(device) - began

    def step(kind: str) -> Row:
        seconds = generate(new, kind) - generate(FIRST, kind)
        return {"ms": max(1e3 * seconds / (new - FIRST), 1e-3)}

    steps = {kind: functools.partial(step, kind) for kind in ("dynamic", "static")}
    return {"prefill": prefill, **steps}


def measure(
    calls: dict[str, Callable[[], Row]], repeats: int, device: torch.device
) -> dict[str, Row]:
    """By form: the median of repeated calls after a first one, all forms in turn, and memory."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    found: dict[str, Row] = {name: {} for name in calls}
    for index in range(1 + repeats):
        for name, call in calls.items():
            if "failed" in found[name]:
                continue
            if device.type == "cuda":
                torch.cuda.reset_peak_memory_stats(device)
            row = common.attempt(call, device)
            if "failed" in row:
                found[name] = row
            elif index:
                times[name].append(row["ms"])
            if device.type == "cuda" and "failed" not in row:
                found[name] = {"peak_mib": round(torch.cuda.max_memory_allocated(device) / 2**20)}
    for name, row in found.items():
        if "failed" not in row:
            row["ms"] = common.quantiles(times[name])["p50_ms"]
    return found


def measure_case(
    network: Any, forms: Sequence[Form], B: int, context: int, plan: Plan
) -> list[Row]:
    """The rows of all forms at one batch and context."""
    torch._dynamo.reset()  # graphs of other shapes
    torch._dynamo.config.recompile_limit = MOST_GRAPHS
    ids = draw(network, B, context)
    calls = {form.name: calls_of(form, network, ids, plan) for form in forms}
    rows = {
        form.name: {"B": B, "T": context, "form": form.name, "settings": form.settings}
        for form in forms
    }
    # large cases vary little
    few = min(1 if B * context > 2**15 else 2, plan.repeats)
    for what in MEASURES:
        if what == "static" and context < max(plan.contexts):
            continue
        timed = [form.name for form in forms if form.static or what != "static"]
        chosen = {name: calls[name][what] for name in timed}
        measured = measure(chosen, plan.repeats if what == "prefill" else few, ids.device)
        for name, found in measured.items():
            rows[name] |= {f"{what}_{field}": value for field, value in found.items()}
            if "ms" in found:
                tokens = ids.numel() if what == "prefill" else len(ids)
                rows[name][f"{what}_tokens_per_s"] = round(tokens / found["ms"] * 1e3, 2)
    return list(rows.values())


def measure_all(network: Any, plan: Plan, recorder: common.Recorder) -> None:
    """The rows of all cases; a form whose logits are off has one that says so."""
    config = network.config
    known = {
        "model": plan.name,
        "layers": config.num_hidden_layers,
        "all_layers": SHAPES[plan.name]["num_hidden_layers"],
        "H": config.num_attention_heads,
        "K": config.num_key_value_heads,
        "new_tokens": plan.new_tokens,
        "dtype": str(plan.dtype).removeprefix("torch."),
        "transformers": common.version("transformers"),
    }
    forms, small = [], checked_network(network)
    for form in plan.forms:
        try:
            check(form, small)
            forms.append(form)
        except WrongResult as error:
            recorder.add({"form": form.name, **known, "failed": f"wrong: {error}"})
    common.release()
    for context in sorted(plan.contexts, reverse=True):
        for B in sorted(plan.batches, reverse=True):
            for row in measure_case(network, forms, B, context, plan):
                recorder.add({**row, **known})
            common.release()


# the table

MEASURES = {
    "prefill": "prefill, thousand tokens/s",
    "dynamic": "decoding, tokens/s",
    "static": "decoding over a static cache, tokens/s",
}


def table(rows: Sequence[Row]) -> str:
    """Tokens a second, in brackets times as fast as SDPA in the same run; GiB."""

    def case(row: Row) -> tuple[Any, ...]:
        return tuple(row.get(name) for name in ("model", "layers", "B", "T", "gpu", "commit"))

    dense = {case(row): row for row in rows if row["form"] == BASELINE}
    cells = [
        row | {"what": what, "base": dense.get(case(row), {}).get(f"{what}_ms")}
        for what in MEASURES
        for row in rows
        if f"{what}_ms" in row or f"{what}_failed" in row
    ]

    def cell(passes: dict[str, Row]) -> str:
        (row,) = passes.values()
        speed = row.get(f"{row['what']}_tokens_per_s")
        if speed is None:
            return "failed"
        text = f"{speed / 1e3:.1f}" if row["what"] == "prefill" else f"{speed:.0f}"
        base, peak = row["base"], row.get(f"{row['what']}_peak_mib")
        text += f" ({base / row[row['what'] + '_ms']:.2f})" if base else ""
        return text if peak is None else f"{text}; {peak / 1024:.1f}"

    def title(row: Row) -> str:
        heads = f"{row['H']} query and {row['K']} KV heads, {row['dtype']}"
        model = f"{row['model']} ({row['layers']} of {row['all_layers']} layers, {heads})"
        return f"{model}, {row['gpu']}, {MEASURES[row['what']]} (times SDPA); peak GiB"

    return common.grid(
        cells, "", lambda row: row["form"], lambda row: (f"B={row['B']}", row["T"]), cell, title
    )


TABLES = {PAGE: {"generation": table}}


# the program


def options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--model", choices=SHAPES, default="smollm2-135m", help="a shape, with random weights")
    add("--layers", type=int, help="of the shape, all by default")
    add("--contexts", type=int, nargs="+", default=(2048, 4096, 8192), metavar="T")
    add("--batches", type=int, nargs="+", default=(1, 16), metavar="B")
    add("--new-tokens", type=int, default=64)
    add("--s", type=int, nargs="+", default=(64,), help="block sizes")
    add("--forms", nargs="+", metavar="NAME", help="all by default")


def plan_of(args: argparse.Namespace) -> Plan:
    if args.quick:
        forms = forms_of((16,), local=32, ranked=32)
        return Plan("tiny", forms, (256,), (2,), FIRST + 2, 1, torch.float32)
    forms = forms_of(args.s)
    known = [form.name for form in forms]
    if unknown := [name for name in args.forms or () if name not in known]:
        raise ValueError(f"forms must be of {', '.join(known)}, got {unknown[0]}")
    chosen = tuple(form for form in forms if form.name in (args.forms or known))
    contexts, batches = tuple(args.contexts), tuple(args.batches)
    return Plan(args.model, chosen, contexts, batches, args.new_tokens)


def run(args: argparse.Namespace, recorder: common.Recorder) -> None:
    plan = plan_of(args)
    measure_all(network_of(plan.name, args.layers, args.device, plan.dtype), plan, recorder)


BENCHMARK = common.Benchmark(
    "generation", __doc__, options, run, ("model", "form", "B", "T"), TABLES
)
main = BENCHMARK.main

if __name__ == "__main__":
    main()
