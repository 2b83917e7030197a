"""Prefill and decoding of a model of transformers: sparse attention against its own SDPA attention.

    python -m benchmarks.generation --model llama-8b --layers 8    append rows, print the table
    python -m benchmarks.generation --table       redraw docs/huggingface.md, print the table
    python -m benchmarks.generation --quick       a tiny model, nothing recorded

A model has random weights in the shape of a published one (`--model`, `--layers` cuts its depth),
or those of a folder or a GGUF file (`--path`). Prompts are random tokens without padding, in bf16.
All forms of attention share the weights and take turns in one process. They are SDPA, SDPA without
its cuDNN backend, what `use_sparse_attention` gives by default, and one softmax over 64 initial,
512 local and 512 ranked tokens in blocks of `--s`, ranked by the greatest logit (for a group of
heads, or for each head) or by means; and the model that `convert` makes, with a learned ranking, or
with what it does by default.

* prefill: wall time of one forward over the prompt with a new `DynamicCache` and the logits of the
  last token. p50 of several after a first one.
* graph: the same in one CUDA graph, by `torch.compile(model.forward, mode="reduce-overhead")`, over
  a new `DynamicCache`; of converted models and forms with windows over a static cache, which an
  eager call has allocated. SDPA has no mask, which some releases of transformers make where they
  compile.
* decode: greedy `generate`, with a `DynamicCache` (sparse forms a `SparseCache`), and with
  `cache_implementation="static"` (forms with windows a `StaticSparseCache`), whose step
  transformers compiles on a GPU. Tokens/s of all
  sequences from new token 9 to the last: the first ones compile, and record CUDA graphs. first_s is
  the time of the first call of `generate`, which compiles.
* unseen: decode with a `DynamicCache` from shorter prompts, whose steps have numbers of keys that
  the form has not computed before: cuDNN makes a plan for each of them.
* peak_mib: greatest memory of tensors during the timed call, weights included.

Nothing is timed of a form before its logits with all blocks selected agree with those of SDPA, in
fp32, in two layers of the model's widths: of a forward, of steps over either cache, and of compiled
forwards and steps where those are timed. The longest context and the largest batch come first;
`--deadline` stops before the next case.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import functools
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from . import common, generation_report
from .common import Row
from .generation_forms import (
    Form,
    cache_argument,
    forms_of,
    new_cache,
    static_cache,
    under,
    without_mask,
)
from .oracle import WrongResult
from .pretrained_model import gguf_source, unpacked

RESULTS = common.RESULTS / "generation.jsonl"
CONTEXTS = (2048, 4096, 8192)
BATCHES = (1, 16)
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
    "tiny": dict(
        num_hidden_layers=2, hidden_size=96, intermediate_size=128, num_attention_heads=6,
        num_key_value_heads=2, head_dim=16, vocab_size=256,
    ),
}  # fmt: skip
CACHES = ("dynamic", "static")
# new tokens of a call that are not timed
FIRST = 8
# calls of a compiled forward before it replays its CUDA graph
WARM_UP = 2
# of the check
CHECK_LAYERS, CHECK_STEPS = 2, 3
# of the root mean square of logits: products in tf32 have 11 bits, and errors grow over two layers
MOST_OFF = 2**-8
# graphs of all forms of a case, of one function of transformers
MOST_GRAPHS = 64


@dataclasses.dataclass(frozen=True)
class Plan:
    name: str
    forms: tuple[Form, ...]
    contexts: tuple[int, ...] = CONTEXTS
    batches: tuple[int, ...] = BATCHES
    new_tokens: int = 64
    static_contexts: tuple[int, ...] = CONTEXTS[-1:]
    static_forms: tuple[str, ...] = ()  # names; a compilation each
    repeats: int = 3
    dtype: torch.dtype = torch.bfloat16
    deadline: float | None = None  # seconds
    out: Path | None = None


# the model


def network_of(
    shape: str, layers: int | None, device: torch.device, dtype: torch.dtype, **others: Any
) -> Any:
    """A Llama of random weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = SHAPES[shape] | dict(bos_token_id=None, eos_token_id=None, pad_token_id=0)
    if layers is not None:
        sizes |= dict(num_hidden_layers=layers)
    config = LlamaConfig(**sizes | dict(max_position_embeddings=2**17) | others)
    return initialised(LlamaForCausalLM, config, device, dtype)


def initialised(
    make: Callable[[Any], Any], config: Any, device: torch.device, dtype: torch.dtype
) -> Any:
    """A model whose weights are drawn on the device."""
    before = torch.get_default_dtype()
    torch.manual_seed(0)
    try:
        torch.set_default_dtype(dtype)
        with device:
            return make(config).eval()
    finally:
        torch.set_default_dtype(before)


def loaded(path: Path, device: torch.device, dtype: torch.dtype) -> Any:
    """The model of a folder or of a GGUF file.

    Raises:
        ValueError: neither.
    """
    from transformers import AutoModelForCausalLM

    if not path.exists():
        raise ValueError(f"path must be a folder or a GGUF file, got {path}")
    source: Any = dict(pretrained_model_name_or_path=path, dtype=dtype)
    if path.is_file():
        source = gguf_source(path) | unpacked(dtype)
    return AutoModelForCausalLM.from_pretrained(**source).to(device).eval()


def checked_network(network: Any, device: torch.device) -> Any:
    """A model of the same widths with two layers of random weights, in fp32."""
    config = copy.deepcopy(network.config)
    few = min(CHECK_LAYERS, config.num_hidden_layers)
    kinds = getattr(config, "layer_types", None)
    config.num_hidden_layers, config.vocab_size = few, 512
    if kinds is not None:
        config.layer_types = kinds[:few]
    config.bos_token_id = config.eos_token_id = config.pad_token_id = None
    # queries and keys of such a size that attention is not uniform
    config.initializer_range = 1.5 * config.hidden_size**-0.5
    return initialised(type(network), config, device, torch.float32)


def draw(model: Any, batch: int, context: int) -> Tensor:
    """Tokens [B T]."""
    device = model.device
    generator = torch.Generator(device).manual_seed(0)
    most = model.config.vocab_size
    return torch.randint(most, (batch, context), device=device, generator=generator)


# the check


@torch.no_grad()
def check(form: Form, network: Any, static: bool = False) -> float:
    """Error of logits with all blocks selected against SDPA, of a forward and of steps of decoding;
    with `static` also of `generate` over a static cache, whose steps are compiled on a GPU, and of
    a forward in one CUDA graph there.

    Raises:
        WrongResult: more than rounding explains.
    """
    from transformers import StaticCache

    if form.settings is None:
        return 0.0
    sizes = form.described(under(form, network)) or {}
    s, own = sizes["selection_block_size"], dict(form.settings, dense_length=0)
    forced = sizes["num_initial_blocks"] + sizes["num_local_blocks"]
    # All blocks but that of the last queries are selected: with one more, SDPA would compute it.
    whole = (forced + 4) * s
    ids = draw(network, 2, whole + s // 2)
    exact = under(Form("sdpa"), network)(ids, use_cache=False).logits
    model = under(dataclasses.replace(form, settings=own | dict(num_selected_blocks=4)), network)
    off = error_of(model(ids, use_cache=False).logits[:, :whole], exact[:, :whole])
    # differentiable top-n is never given to SDPA; steps of decoding have the same kernels
    own |= dict(num_selected_blocks=5, use_diff_topk=True)
    if form.converted:  # a learned ranking has no differentiable top-n
        own["importance"] = "max"
    model = under(dataclasses.replace(form, settings=own), network)
    start = ids.shape[1] - CHECK_STEPS
    stores = [new_cache(form, model)]
    length = ids.shape[1] + 5
    kept = static_cache(form, model, length)
    stores.append(kept or StaticCache(config=model.config, max_cache_len=length))
    for cache in stores:
        given: Any = {cache_argument(): cache}
        model(ids[:, :start], **given)
        steps = [model(ids[:, i : i + 1], **given).logits for i in range(start, ids.shape[1])]
        off = max(off, error_of(torch.cat(steps, dim=1), exact[:, start:]))
    if static:
        if ids.is_cuda:
            empty, forward = in_graph(form, model, ids, length)
            for _ in range(WARM_UP + 1):  # of all logits: the last one replays its graph
                off = max(off, error_of(forward(empty()).logits, exact))
        prompt, kept = ids[:, :start], static_cache(form, model, ids.shape[1] + 5)
        where = {cache_argument(): kept} if kept else dict(cache_implementation="static")
        made = model.generate(
            prompt, attention_mask=torch.ones_like(prompt), do_sample=False, pad_token_id=0,
            max_new_tokens=CHECK_STEPS, output_logits=True, return_dict_in_generate=True, **where,
        )  # fmt: skip
        exact = under(Form("sdpa"), network)(made.sequences, use_cache=False).logits
        off = max(off, error_of(torch.stack(made.logits, dim=1), exact[:, start - 1 : -1]))
    if not off <= MOST_OFF:
        raise WrongResult(f"logits with all blocks are {off:.1e} off SDPA's: {MOST_OFF:.1e}")
    return off


def in_graph(
    form: Form, model: Any, ids: Tensor, room: int, kept: Any = None
) -> tuple[Callable[[], Any], Callable[..., Any]]:
    """An empty cache at each call: a `DynamicCache`, or a static one (`kept`, or a new one with
    this room) for forms that keep more than keys and values. And a forward of the tokens over it,
    compiled as one CUDA graph, which is called with the cache and the model's other arguments; it
    has warmed up. SDPA gets no mask."""
    from transformers import DynamicCache, StaticCache

    model = without_mask(model) if form.settings is None else model
    # lengths that other calls of the model had would be symbols
    compiled = torch.compile(model.forward, mode="reduce-overhead", dynamic=False)
    kept = kept or static_cache(form, model, room)
    if form.converted:
        kept = StaticCache(config=model.config, max_cache_len=room)
    if kept is not None:
        model(ids[:, :1], **{cache_argument(): kept})  # allocates it, outside of the graph

    def empty() -> Any:
        if kept is None:
            return DynamicCache(config=model.config)
        kept.reset()
        return kept

    def forward(cache: Any, **others: Any) -> Any:
        torch.compiler.cudagraph_mark_step_begin()
        return compiled(ids, **{cache_argument(): cache}, **others)

    for _ in range(WARM_UP if ids.is_cuda else 0):
        forward(empty(), logits_to_keep=1)
    return empty, forward


def error_of(found: Tensor, exact: Tensor) -> float:
    return ((found - exact).norm() / exact.norm()).item()


# times


def synchronize(device: torch.device) -> float:
    """The time at which the device has done all work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def with_peak(call: Callable[[], Any], device: torch.device) -> tuple[Any, int | None]:
    """What a call gives, and the greatest memory of tensors in it, MiB."""
    if device.type != "cuda":
        return call(), None
    synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    found = call()
    return found, round(torch.cuda.max_memory_allocated(device) / 2**20)


class Clock:
    """A criterion that never stops `generate`, and notes when tokens are there."""

    def __init__(self, tokens: Sequence[int], batch: int, device: torch.device) -> None:
        self.tokens, self.device = tokens, device
        self.times: list[float] = []
        self.count = 0
        self.never = torch.zeros(batch, dtype=torch.bool, device=device)

    def __call__(self, ids: Tensor, scores: Any, **others: Any) -> Tensor:
        self.count += 1
        if self.count in self.tokens:
            self.times.append(synchronize(self.device))
        return self.never


class Timed:
    """One form of a case."""

    def __init__(self, form: Form, network: Any, ids: Tensor, plan: Plan) -> None:
        self.form, self.ids, self.plan = form, ids, plan
        self.model = under(form, network)
        self.ones = torch.ones_like(ids)
        # of all calls: a graph has its addresses
        self.static = static_cache(form, self.model, ids.shape[1] + plan.new_tokens)
        self.row: Row = {}
        self.compiled: Any = None  # of `in_graph`

    def attempt(self, what: str, call: Callable[[], Any]) -> Any:
        """What a call gives; None where it fails, whose reason the row keeps."""
        if f"{what}_failed" in self.row:
            return None
        try:
            with warnings.catch_warnings(), self.form.chosen():
                warnings.simplefilter("ignore")
                return call()
        except Exception as error:  # a form that fails leaves a row with its reason
            self.row[f"{what}_failed"] = common.why(error)
            if not common.still_alive(self.ids.device):
                raise
            common.release()
            return None

    @torch.no_grad()
    def prefill(self) -> float:
        """Milliseconds of a forward."""
        given: Any = {cache_argument(): new_cache(self.form, self.model)}
        began = synchronize(self.ids.device)
        self.model(self.ids, attention_mask=self.ones, logits_to_keep=1, **given)
        return 1e3 * (synchronize(self.ids.device) - began)

    @torch.no_grad()
    def graph(self) -> float:
        """Milliseconds of a forward in one CUDA graph."""
        if self.compiled is None:
            room = self.ids.shape[1] + self.plan.new_tokens
            self.compiled = in_graph(self.form, self.model, self.ids, room, self.static)
        empty, forward = self.compiled
        cache = empty()
        began = synchronize(self.ids.device)
        forward(cache, logits_to_keep=1)
        return 1e3 * (synchronize(self.ids.device) - began)

    def decode(self, cache: str, new_tokens: int, less: int = 0) -> tuple[float, float]:
        """Seconds of a call of `generate` from a prompt of so many tokens less, and of its tokens
        after the first ones."""
        from transformers import StoppingCriteriaList

        B, device = len(self.ids), self.ids.device
        ids, ones = (t[:, : t.shape[1] - less] for t in (self.ids, self.ones))
        clock: Any = Clock((FIRST, new_tokens), B, device)
        given: dict[str, Any] = dict(cache_implementation="static")
        if cache == "dynamic":
            given = {cache_argument(): new_cache(self.form, self.model)}
        elif self.static is not None:
            self.static.reset()
            given = {cache_argument(): self.static}
        began = synchronize(device)
        self.model.generate(
            ids, attention_mask=ones, do_sample=False, pad_token_id=0,
            max_new_tokens=new_tokens, min_new_tokens=new_tokens,
            stopping_criteria=StoppingCriteriaList([clock]), **given,
        )  # fmt: skip
        return synchronize(device) - began, clock.times[1] - clock.times[0]


def take_turns(
    timed: Sequence[Timed], what: str, once: Callable[[Timed], Any], repeats: int
) -> list[tuple[Any, list[Any]]]:
    """Of each form the first call and the repeated ones, all forms in turn; peaks into the rows."""
    device = timed[0].ids.device
    found: list[tuple[Any, list[Any]]] = [
        (t.attempt(what, functools.partial(once, t)), []) for t in timed
    ]
    for _ in range(repeats):
        for t, (_, times) in zip(timed, found, strict=True):
            one = t.attempt(what, functools.partial(with_peak, functools.partial(once, t), device))
            if one is not None:
                times.append(one[0])
                t.row[f"{what}_peak_mib"] = one[1]
    return found


def measure_prefill(timed: Sequence[Timed], what: str, repeats: int) -> None:
    once = {"prefill": Timed.prefill, "graph": Timed.graph}[what]
    for t, (_, times) in zip(timed, take_turns(timed, what, once, repeats), strict=True):
        if times:
            ms = common.quantiles(times)["p50_ms"]
            t.row |= {f"{what}_ms": ms, f"{what}_tokens_per_s": round(t.ids.numel() / ms * 1e3)}


def measure_decode(timed: Sequence[Timed], cache: str, repeats: int) -> None:
    new = timed[0].plan.new_tokens
    calls = take_turns(timed, cache, lambda t: t.decode(cache, new), repeats)
    for t, (first, times) in zip(timed, calls, strict=True):
        if times:
            t.row[f"{cache}_first_s"] = round(first[0], 3)
            add_speed(t, cache, [s for _, s in times])


def measure_unseen(timed: Sequence[Timed], repeats: int) -> None:
    """Decoding from prompts of other lengths than `measure_decode` has."""
    new = timed[0].plan.new_tokens
    shorter = [new * i for i in range(1, repeats + 1) if new * i < timed[0].ids.shape[1]]
    for t in timed:
        calls = [
            t.attempt("unseen", functools.partial(t.decode, "dynamic", new, m)) for m in shorter
        ]
        add_speed(t, "unseen", [call[1] for call in calls if call is not None])


def add_speed(timed: Timed, what: str, seconds: Sequence[float]) -> None:
    """The median time of a new token."""
    if seconds:
        new = timed.plan.new_tokens - FIRST
        ms = common.quantiles([1e3 * s / new for s in seconds])["p50_ms"]
        speed = round(1e3 * len(timed.ids) / ms, 2)
        timed.row |= {f"{what}_ms": ms, f"{what}_tokens_per_s": speed}


def case(
    network: Any, forms: Sequence[Form], B: int, context: int, static: bool, plan: Plan
) -> list[Row]:
    """The rows of all forms at one batch and context."""
    torch._dynamo.reset()  # graphs of other shapes
    torch._dynamo.config.recompile_limit = MOST_GRAPHS
    ids = draw(network, B, context)
    timed = [Timed(form, network, ids, plan) for form in forms]
    # large cases vary little
    few = 1 if B * context > 2**15 else 2
    measure_prefill(timed, "prefill", plan.repeats)
    measure_decode(timed, "dynamic", min(few, plan.repeats))
    measure_unseen(timed, min(few + 1, plan.repeats))
    of_static = [t for t in timed if t.form.name in plan.static_forms] if static else []
    if of_static:
        measure_decode(of_static, "static", min(few, plan.repeats))
        measure_prefill(of_static, "graph", plan.repeats)
    return [{"B": B, "T": context, **described(t), **t.row} for t in timed]


def described(timed: Timed) -> Row:
    form, settings = timed.form, timed.form.described(timed.model)
    cache = None if settings is None else not form.converted
    return {"form": form.name, "settings": settings, "sparse_cache": bool(cache)}


# rows


def run(network: Any, plan: Plan) -> list[Row]:
    """Append the rows of all cases.

    Raises:
        WrongResult: a form whose logits are off; the others have their rows.
    """
    began, device = time.perf_counter(), network.device
    config, shape = network.config, SHAPES.get(plan.name, {})
    known = {
        "model": plan.name,
        "layers": config.num_hidden_layers,
        "all_layers": shape.get("num_hidden_layers", config.num_hidden_layers),
        "H": config.num_attention_heads,
        "K": config.num_key_value_heads,
        "new_tokens": plan.new_tokens,
        "dtype": str(plan.dtype).removeprefix("torch."),
        "transformers": common.version("transformers"),
        **common.environment(device),
    }
    rows: list[Row] = []
    forms, wrong = checked(network, plan, device)
    for context in sorted(plan.contexts, reverse=True):
        for B in sorted(plan.batches, reverse=True):
            if plan.deadline is not None and time.perf_counter() - began > plan.deadline:
                print(f"stopped before B={B}, T={context}: deadline", flush=True)
                return rows
            for row in case(network, forms, B, context, context in plan.static_contexts, plan):
                rows.append({**row, **known})
                common.append_row(plan.out, rows[-1])
                print(generation_report.show(rows[-1]), flush=True)
            common.release()
    if wrong:
        raise WrongResult(wrong)
    return rows


def checked(network: Any, plan: Plan, device: torch.device) -> tuple[list[Form], str | None]:
    """The forms that agree with SDPA, and what is wrong with the first other one."""
    small, right, wrong = checked_network(network, device), [], None
    for form in plan.forms:
        static = bool(plan.static_contexts) and form.name in plan.static_forms
        try:
            off = check(form, small, static)
        except WrongResult as error:
            wrong = wrong or f"{form.name}: {error}"
            print(f"{form.name} is not timed: {error}", flush=True)
            continue
        right.append(form)
        if form.settings is not None:
            print(f"{form.name}: logits with all blocks are {off:.1e} off", flush=True)
    del small
    common.release()
    return right, wrong


# the command line


def quick(device: torch.device, out: Path | None) -> tuple[Any, Plan]:
    forms = forms_of((16,), local=32, ranked=32)
    sizes: dict[str, Any] = dict(contexts=(256,), batches=(2,), static_contexts=(256,))
    sizes |= dict(new_tokens=FIRST + 2, repeats=1)
    sizes["static_forms"] = ("sdpa", "max of 16", "converted, 16")
    network = network_of("tiny", None, device, torch.float32)
    return network, Plan("tiny", forms, **sizes, dtype=torch.float32, out=out)


def asked(args: argparse.Namespace, device: torch.device, out: Path | None) -> tuple[Any, Plan]:
    forms = forms_of(args.s)
    known = [form.name for form in forms]
    static = args.static_forms or [
        "sdpa",
        next(n for n in known if n.startswith("max of")),
        "defaults",
    ]
    for name, given in (("forms", args.forms or []), ("static-forms", static)):
        if not set(given) <= set(known):
            raise ValueError(f"{name} must be of {', '.join(known)}, got {', '.join(given)}")
    least = dict(new_tokens=FIRST + 2, repeats=1, deadline=0)
    values = {name: getattr(args, name) for name in least}
    values |= {name: min(getattr(args, name)) for name in ("contexts", "batches")}
    for name, value in values.items():
        at_least = {"contexts": 2, "batches": 1}.get(name, least.get(name, 0))
        if value is not None and value < at_least:
            raise ValueError(f"{name} must be at least {at_least}, got {value}")
    if args.layers is not None and args.layers < 1:
        raise ValueError(f"layers must be at least 1, got {args.layers}")
    if args.path is not None and args.layers is not None:
        raise ValueError("layers must be left out with path")
    dtype = torch.bfloat16
    plan = Plan(
        args.model if args.path is None else args.path.stem,
        tuple(f for f in forms if not args.forms or f.name in args.forms),
        tuple(args.contexts), tuple(args.batches), args.new_tokens,
        (max(args.contexts),) if args.static_contexts is None else tuple(args.static_contexts),
        tuple(static), args.repeats, dtype, args.deadline, out,
    )  # fmt: skip
    if args.path is not None:
        return loaded(args.path, device, dtype), plan
    return network_of(args.model, args.layers, device, dtype), plan


def main(argv: list[str] | None = None) -> list[Row]:
    parser = argparse.ArgumentParser(prog="benchmarks.generation")
    add = parser.add_argument
    add("--model", choices=SHAPES, default="smollm2-135m", help="a shape, with random weights")
    add("--layers", type=int, help="of the shape, all by default")
    add("--path", type=Path, help="a folder or a GGUF file, instead of a shape")
    add("--contexts", type=int, nargs="+", default=CONTEXTS, metavar="T")
    add("--batches", type=int, nargs="+", default=BATCHES, metavar="B")
    add("--new-tokens", type=int, default=64)
    add("--s", type=int, nargs="+", default=(64,), help="block sizes")
    add("--forms", nargs="+", metavar="NAME", help="all by default")
    add("--static-contexts", type=int, nargs="*", metavar="T", help="the longest by default")
    add("--static-forms", nargs="+", metavar="NAME", help="sdpa, max and defaults by default")
    add("--repeats", type=int, default=3, help="of a forward; generate has fewer")
    add("--deadline", type=float, help="seconds after which no case begins")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add("--out", type=Path, help="JSONL; results/generation.jsonl, none with --quick")
    add("--table", action="store_true", help="redraw the page of the rows there")
    add("--quick", action="store_true", help="a tiny model, nothing recorded")
    args = parser.parse_args(argv)
    if args.table:
        rows = common.read_rows(args.out or RESULTS)
        generation_report.draw(rows)
        return rows
    device = torch.device(args.device)
    out = args.out or (None if args.quick else RESULTS)
    network, plan = quick(device, out) if args.quick else asked(args, device, out)
    rows = run(network, plan)
    print(generation_report.table(rows), flush=True)
    return rows


if __name__ == "__main__":
    main()
