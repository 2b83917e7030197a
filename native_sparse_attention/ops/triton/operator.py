"""Definition of torch operators that take tensors, numbers and the fields of `AttentionConfig`.

torch passes an operator a flat tuple. `Arguments` names its items, so that no code depends on their
order, and adds the fields of the settings to the schema. This module does not import triton.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from ...block_sizes import BlockSizes, flat
from ...compat import transforms
from ...config import AttentionConfig
from ...varlen import Documents

# annotated types of fields, and their types in a schema
TYPES = {
    "int": "SymInt", "bool": "bool", "str": "str", "float | None": "float?",
    "BlockSizes | None": "SymInt[]?",
}  # fmt: skip
# operators compute all branches, or one
NOT_OF_OPERATORS = ("branches", "dense_length")
CONFIG = {
    field.name: TYPES[str(field.type)]
    for field in fields(AttentionConfig)
    if field.name not in NOT_OF_OPERATORS
}
# bounds of documents; positions of the first queries [B], in place of the number `start`
LAYOUT = ("Tensor? starts", "Tensor? doc_first", "Tensor? doc_last")


class Arguments:
    """Arguments of an operator: `declared` as in a schema ("Tensor? cq", "SymInt start"), then the
    fields of the settings if it has settings."""

    def __init__(self, *declared: str, settings: bool = True) -> None:
        self.declared = declared
        self.names = tuple(one.split()[1] for one in declared)
        self.tensors = tuple(one.split()[1] for one in declared if one.startswith("Tensor"))
        self.settings = CONFIG if settings else {}

    def schema(self, returns: str) -> str:
        settings = (f"{kind} {name}" for name, kind in self.settings.items())
        return f"({', '.join((*self.declared, *settings))}) -> {returns}"

    def flat(self, config: AttentionConfig | None, **values: Any) -> list[Any]:
        """The values in order; a missing value is None."""
        settings = {name: getattr(config, name) for name in self.settings}
        if config is not None and isinstance(config.block_sizes, BlockSizes):
            settings["block_sizes"] = flat(config.block_sizes)
        return [*(values.get(name) for name in self.names), *settings.values()]

    def named(self, values: tuple[Any, ...]) -> SimpleNamespace:
        """The values by name, and the settings as `config`, whose `block_sizes` are a tuple."""
        found = dict(zip((*self.names, *self.settings), values, strict=True))
        config = None
        if self.settings:
            settings = {name: found.pop(name) for name in CONFIG}
            if settings["block_sizes"] is not None:
                settings["block_sizes"] = tuple(settings["block_sizes"])
            config = AttentionConfig.unchecked(**settings)
        return SimpleNamespace(**found, config=config)

    def given(self, config: AttentionConfig | None, values: dict[str, Any]) -> SimpleNamespace:
        """`named(flat(config, **values))`."""
        return SimpleNamespace(**dict.fromkeys(self.names) | values, config=config)

    def flat_tensors(self, values: dict[str, Any]) -> list[Any]:
        """The tensors in order; lists are flattened."""
        found: list[Any] = []
        for name in self.tensors:
            value = values.get(name)
            found.extend(value) if isinstance(value, (list, tuple)) else found.append(value)
        return found

    def gradients(self, found: dict[str, Any]) -> tuple[Any, ...]:
        """A gradient for each argument, or None."""
        return (*(found.get(name) for name in self.names), *(None,) * len(self.settings))


class Operator:
    """A torch operator, called by the names of its arguments.

    torch takes 0.5 ms to dispatch this many arguments to a differentiable operator. A plain call
    (`transforms.is_plain`) therefore runs the same function in its own autograd node. Compilers,
    modes, transforms and tensor subclasses get the operator.

    Args:
        op: the operator that torch registered under this name.
        run: the function of named arguments that computes it.
        mutates: names of the tensors that it writes to.

    `before`, if set, precedes each plain call, with the arguments and whether autograd records.
    """

    def __init__(
        self,
        name: str,
        op: Any,
        arguments: Arguments,
        run: Callable[..., Any],
        mutates: tuple[str, ...],
    ) -> None:
        self.name, self.op, self.arguments = name, op, arguments
        self.run, self.mutates = run, mutates
        self.node: Any = None
        self.before: Callable[[SimpleNamespace, bool], None] | None = None

    def __call__(self, config: AttentionConfig | None = None, **values: Any) -> Any:
        tensors = self.arguments.flat_tensors(values)
        wanted = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)
        if (wanted and self.node is None) or not transforms.is_plain(tensors):
            return self.op(*self.arguments.flat(config, **values))
        at = self.arguments.given(config, values)
        if self.before is not None:
            self.before(at, wanted)
        if wanted:
            return self.node.apply(at, *tensors)
        out = self.run(at)
        written = (getattr(at, name) for name in self.mutates)
        for tensor in written:
            if tensor is not None and not tensor.is_inference():
                torch.autograd.graph.increment_version(tensor)
        return out

    def differentiable(
        self, setup: Callable[..., None], backward: Callable[..., dict[str, Any]], many: bool
    ) -> None:
        """Make the operator differentiable. `setup(ctx, at, output)` takes named arguments;
        `backward(ctx, grads)` returns gradients by name. `many`: the result is one list."""
        arguments, run = self.arguments, self.run

        def of_op(ctx: Any, *grads: Any) -> tuple[Any, ...]:
            return arguments.gradients(backward(ctx, grads[0] if many else grads))

        def setup_op(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
            setup(ctx, arguments.named(inputs), output)

        self.op.register_autograd(of_op, setup_context=setup_op)

        class Node(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, at: SimpleNamespace, *tensors: Any) -> Any:
                out = run(at)
                out = tuple(out) if isinstance(out, list) else out
                lists = (getattr(at, name) for name in arguments.tensors)
                ctx.lengths = [len(t) if isinstance(t, (list, tuple)) else None for t in lists]
                setup(ctx, at, out)
                return out

            @staticmethod
            def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
                found, flat_grads = backward(ctx, grads), [None]
                for name, length in zip(arguments.tensors, ctx.lengths, strict=True):
                    grad = found.get(name)
                    if length is None:
                        flat_grads.append(grad)
                    else:
                        flat_grads.extend([None] * length if grad is None else grad)
                return tuple(flat_grads)

        Node.__name__ = self.name
        self.node = Node


def operator(
    name: str,
    arguments: Arguments,
    returns: str,
    fake: Callable[[SimpleNamespace], Any],
    mutates: tuple[str, ...] = (),
) -> Callable[[Callable[[SimpleNamespace], Any]], Operator]:
    """Make a function of named arguments an operator. It sets the current GPU to the GPU of its
    first tensor, since Triton launches there. It applies `block_sizes` and refuses forward-mode AD.
    `fake` allocates the results without values."""

    def make(run: Callable[[SimpleNamespace], Any]) -> Operator:
        def sized(at: SimpleNamespace) -> Any:
            from ...kernels.common import overrides

            sizes = at.config and at.config.block_sizes
            with overrides.sized(flat(sizes) if isinstance(sizes, BlockSizes) else sizes):
                return run(at)

        def there(at: SimpleNamespace) -> Any:
            with torch.cuda.device_of(arguments.flat_tensors(vars(at))[0]):
                return sized(at)

        def implementation(*values: Any) -> Any:
            return there(arguments.named(values))

        implementation.__name__ = run.__name__
        made = torch.library.custom_op(
            f"native_sparse_attention::{name}", transforms.on_values(implementation),
            mutates_args=mutates, schema=arguments.schema(returns),
        )  # fmt: skip
        made.register_fake(lambda *values: fake(arguments.named(values)))
        transforms.refuse_vmap(made)
        return Operator(name, made, arguments, there, mutates)

    return make


def documents_of(at: SimpleNamespace) -> Documents | None:
    """The documents of an operator's arguments."""
    if at.doc_first is None or at.doc_last is None:
        return None
    return Documents(at.doc_first.contiguous(), at.doc_last.contiguous())


def layout(q_offset: int | Tensor, documents: Documents | None) -> dict[str, Any]:
    """Offset and documents as arguments of an operator: `LAYOUT`, and `start`."""
    starts, start = (q_offset, 0) if isinstance(q_offset, Tensor) else (None, q_offset)
    first, last = (None, None) if documents is None else (documents.first, documents.last)
    return dict(starts=starts, start=start, doc_first=first, doc_last=last)


def rows(*tensors: Tensor) -> Any:
    """Tensors with a last stride of 1; kernels take any other strides."""
    return [t if t.stride(-1) == 1 or t.shape[-1] == 1 else t.contiguous() for t in tensors]


def whole(t: Tensor) -> Tensor:
    """A contiguous tensor at a 16-byte aligned address, for the tensor memory accelerator. A
    gradient may be a view into another tensor."""
    t = t.contiguous()
    return t if t.data_ptr() % 16 == 0 else t.clone()


def empty_outputs(q: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    out = q.new_empty(*q.shape[:3], v.shape[-1])
    return out, q.new_empty(q.shape[:3], dtype=torch.float32)


def empty_block_indices(q: Tensor, ck: Tensor, config: AttentionConfig) -> Tensor:
    """Allocate [B T R n]."""
    ranks = ck.shape[2] if config.query_heads_share_selected_kv else q.shape[2]
    return q.new_empty(*q.shape[:2], ranks, config.num_selected_blocks, dtype=torch.int32)


def prefix(mem_k: Tensor | None, mem_v: Tensor | None, batch: int) -> tuple[Tensor, Tensor] | None:
    """Memory [K m D] as keys and values [B m K D] before all others; None without memory."""
    if mem_k is None or mem_v is None or mem_k.shape[1] == 0:
        return None
    k, v = (m.transpose(0, 1).expand(batch, -1, -1, -1) for m in rows(mem_k, mem_v))
    return k, v


def memory_grads(dk: Tensor, dv: Tensor) -> list[Tensor]:
    """Gradients [K m D] of memory from gradients [B m K D] of its prefix."""
    return [d.sum(0).transpose(0, 1).contiguous() for d in (dk, dv)]


def of_heads(sinks: Tensor | None) -> Any:
    """Sinks in contiguous fp32, for the kernels."""
    return None if sinks is None else sinks.to(torch.float32).contiguous()


def sink_grads(sinks: Tensor, lse: Tensor, delta: Tensor, gates: Tensor | None = None) -> Tensor:
    """Gradient of the sinks [H] of a branch: `-sum p delta` over the queries, times the gates if
    given (a sink has value 0). lse, delta and gates are [B T H]."""
    weighted = torch.exp(sinks.float() - lse) * delta
    weighted = weighted if gates is None else weighted * gates.float()
    return -weighted.sum((0, 1)).to(sinks.dtype)
