"""Compression networks: one window of keys or values becomes one vector (the paper's Eq. 7).

All follow one protocol, `[b h w l d] -> [b h w d]`. `SparseAttention` takes any module of this
protocol as `compress_mlp`. No network mixes windows. w = 0 is allowed: the result is empty and the
weights receive zero gradients.

    b  batch     h  KV heads     w  windows     l  tokens of a window     d  head width

Each token lies in l / stride windows, and windows with positions are copies. Means and sums
therefore also have `compress_segments(segments, m)`, which computes the same result from segments
[b h w stride d] of the sequence: window w is segment w and the m - 1 before it, m = l / stride.

Weights are named as in the published package native-sparse-attention-pytorch 0.2.3.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
import torch.nn.functional as F
from einops import rearrange
from einops.layers.torch import EinMix, Rearrange
from torch import Tensor, nn

from . import blocks
from .checks import (
    check_choice,
    check_factor,
    check_hidden,
    check_int,
    check_ints,
    check_number,
    check_shapes,
    check_type,
)
from .compat import free_size, is_exporting, no_autocast
from .config import AttentionConfig, NSAConfig
from .initialization import Started, StartedLinear
from .ops.reference import upcast
from .varlen import Documents


def check_sizes(dim_head: Any, compress_window_size: Any, heads: Any = 1) -> tuple[int, ...]:
    sizes = dict(dim_head=dim_head, compress_window_size=compress_window_size, heads=heads)
    return check_ints(1, **sizes)


class CompressMLP(nn.Sequential, Started):
    """A sequence of layers."""


def default_compress_mlp(
    dim_head: int, compress_window_size: int, expand_factor: float = 1.0, start: str = "sum"
) -> nn.Sequential:
    """`W2 relu(W1 x + b1) + b2` of the flattened window `x` [l d], the same for every head.

    The hidden width is `int(expand_factor * l * d)`.

    Args:
        start: "sum": the first 2 d hidden units and W2 begin as the sum of the window's tokens, to
            which the other units add. "random": the weights of nn.Linear, as in the published
            package. Shapes and names of weights are the same. Layers that begin with sums learned
            better (docs/dev/log.md).
    """
    check_choice("start", start, ("sum", "random"))
    dim_head, compress_window_size, _ = check_sizes(dim_head, compress_window_size)
    dim = dim_head * compress_window_size
    dim_hidden = check_hidden("expand_factor", expand_factor, dim)
    if start == "random":
        linears = nn.Linear(dim, dim_hidden), nn.Linear(dim_hidden, dim_head)
    else:
        linears = (
            StartedLinear(dim, dim_hidden, functools.partial(start_units, dim_head)),
            StartedLinear(dim_hidden, dim_head, start_output),
        )
    flatten = Rearrange("b h w l d -> b h w (l d)")
    return CompressMLP(flatten, linears[0], nn.ReLU(), linears[1])


def start_units(dim_head: int, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Hidden units of a window [l d] that begin as the sums `s` of k features over its tokens and
    as `-s`, k of each."""
    units, width = weight.shape
    sums = torch.eye(dim_head, device=weight.device)[: units // 2].repeat(1, width // dim_head)
    values = torch.full(weight.shape, math.nan, device=weight.device)
    values[: 2 * len(sums)] = torch.cat((sums, -sums))
    return values, values[:, 0].abs() * 0


def start_output(weight: Tensor) -> tuple[Tensor]:
    """The map of hidden units to an output that begins with the sums: `relu(s) - relu(-s) = s`."""
    d, units = weight.shape
    one = torch.eye(d, device=weight.device)[:, : units // 2]
    values = torch.full(weight.shape, math.nan, device=weight.device)
    values[:, : 2 * one.shape[1]] = torch.cat((one, -one), dim=1)
    return (values,)


def start_identity(weight: Tensor) -> tuple[Tensor]:
    return (torch.eye(len(weight), device=weight.device),)


def windows_summed(segments: Tensor, m: int) -> Tensor:
    """Sums of tokens over windows of m segments, in float32 or better: [b h w d]."""
    dtype, w = torch.promote_types(segments.dtype, torch.float32), segments.shape[2]
    sums = F.pad(segments.sum(dim=3, dtype=dtype), (0, 0, m - 1, 0))
    return functools.reduce(torch.add, (sums.narrow(2, i, w) for i in range(m)))


class MeanPool(Started):
    """The mean of a window's tokens, without weights."""

    def forward(self, kv: Tensor) -> Tensor:
        return kv.mean(dim=-2)

    def compress_segments(self, segments: Tensor, m: int) -> Tensor:
        return (windows_summed(segments, m) / (m * segments.shape[3])).to(segments.dtype)


class SumPool(Started):
    """The sum of a window's tokens, times a learned gain for each feature: `y = g * sum_l x_l`, g
    [d] initially `gain`.

    Where one token of a window matters, its part of the mean is 1 / l, and logits of compressed
    keys are small. With sums a layer learns associative recall sooner (docs/dev/log.md).
    """

    def __init__(self, dim_head: int, gain: float = 1.0):
        super().__init__()
        self.begin = check_factor("gain", gain)
        self.gain = nn.Parameter(torch.full(check_ints(1, dim_head=dim_head), self.begin))

    def reset_parameters(self) -> None:
        nn.init.constant_(self.gain, self.begin)

    def forward(self, kv: Tensor) -> Tensor:
        return kv.sum(dim=-2) * self.gain.to(kv.dtype)

    def compress_segments(self, segments: Tensor, m: int) -> Tensor:
        return (windows_summed(segments, m) * self.gain).to(segments.dtype)


class ConvLinearCompress(Started):
    """One linear map of the window per head: `y_o = sum_(i, l) W[h, o, i, l] x[l, i] + b[h, o]`.

    The weights are those of a convolution with one group per head, whose kernel and stride are the
    window.
    """

    def __init__(self, heads: int, dim_head: int, compress_window_size: int):
        super().__init__()
        dim_head, l, heads = check_sizes(dim_head, compress_window_size, heads)
        dim = heads * dim_head
        self.conv = nn.Conv1d(dim, dim, l, stride=l, groups=heads)

    def forward(self, kv: Tensor) -> Tensor:
        # of a longer window the convolution would leave out tokens
        check_shapes(kv=(kv, f"b {self.conv.groups} w {self.conv.kernel_size[0]} d"))
        b, h = kv.shape[:2]
        out = self.conv(rearrange(kv, "b h w l d -> (b w) (h d) l"))
        return rearrange(out, "(b w) (h d) 1 -> b h w d", b=b, h=h, w=kv.shape[2])


class AttentionPool(Started):
    """A weighted mean of the window, per feature: `sum_l softmax_l(W x)[l] * x[l]`, as in Enformer.

    All heads share W [d d], which starts as the identity. The order of tokens does not matter.
    """

    def __init__(self, dim_head: int, compress_window_size: int):
        super().__init__()
        dim_head, *_ = check_sizes(dim_head, compress_window_size)
        self.to_attn_logits = StartedLinear(dim_head, dim_head, start_identity, bias=False)

    def forward(self, kv: Tensor) -> Tensor:
        logits = self.to_attn_logits(kv)
        dtype = torch.promote_types(logits.dtype, torch.float32)
        weights = logits.softmax(dim=-2, dtype=dtype)
        return (weights * kv).sum(dim=-2).to(logits.dtype)


class LinearPerHead(EinMix):
    """A linear map per head, weight [h i o], with `reset_parameters`."""

    def __init__(self, pattern: str, heads: int, i: int, o: int, bias: bool):
        bias_shape = "h o" if bias else None
        super().__init__(pattern, weight_shape="h i o", bias_shape=bias_shape, h=heads, i=i, o=o)

    def reset_parameters(self) -> None:
        """Initialise like EinMix: uniform, weight variance 1/i, bias variance 1/(3 i)."""
        fan_in = self.weight.shape[1]
        nn.init.uniform_(self.weight, -((3 / fan_in) ** 0.5), (3 / fan_in) ** 0.5)
        if self.bias is not None:
            nn.init.uniform_(self.bias, -(fan_in**-0.5), fan_in**-0.5)


class GroupedMLP(Started):
    """`default_compress_mlp` with separate weights for each head."""

    def __init__(
        self, dim_head: int, compress_window_size: int, heads: int, expand_factor: float = 1.0
    ):
        super().__init__()
        dim_head, compress_window_size, heads = check_sizes(dim_head, compress_window_size, heads)
        dim = dim_head * compress_window_size
        dim_hidden = check_hidden("expand_factor", expand_factor, dim)
        pattern = "b h w i -> b h w o"
        self.net = nn.Sequential(
            LinearPerHead(pattern, heads, dim, dim_hidden, bias=True),
            nn.ReLU(),
            LinearPerHead(pattern, heads, dim_hidden, dim_head, bias=True),
        )

    def forward(self, kv: Tensor) -> Tensor:
        return self.net(rearrange(kv, "b h w l d -> b h w (l d)"))


class SingleProjection(Started):
    """A projection without bias or nonlinearity.

    With `heads=1`, all heads share one map of the flattened window [l d]. With more, each head maps
    the **sum** of the window's tokens by its own [d d], as published: token order does not matter.
    """

    def __init__(self, dim_head: int, compress_window_size: int, heads: int = 1):
        super().__init__()
        dim_head, compress_window_size, heads = check_sizes(dim_head, compress_window_size, heads)
        self.compress: nn.Module
        if heads == 1:
            self.compress = nn.Sequential(
                Rearrange("b h w l d -> b h w (l d)"),
                nn.Linear(dim_head * compress_window_size, dim_head, bias=False),
            )
        else:
            pattern = "b h w l i -> b h w o"
            self.compress = LinearPerHead(pattern, heads, dim_head, dim_head, bias=False)

    def forward(self, kv: Tensor) -> Tensor:
        return self.compress(kv)


class WindowAttention(nn.Module):
    """Multi-head self-attention among the tokens of a window, [n l e] -> [n l e].

    `last_only` returns only the last token, [n 1 e]. It uses two products and a softmax: windows
    are short and many, and fused kernels limit their number per launch.
    """

    def __init__(self, dim: int, num_heads: int, dropout: float):
        super().__init__()
        self.num_heads = num_heads
        self.q_proj = nn.Linear(dim, dim)
        self.k_proj = nn.Linear(dim, dim)
        self.v_proj = nn.Linear(dim, dim)
        self.out_proj = nn.Linear(dim, dim)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, last_only: bool = False) -> Tensor:
        q, k, v = self.q_proj(x[:, -1:] if last_only else x), self.k_proj(x), self.v_proj(x)
        q, k, v = (rearrange(t, "n l (h d) -> n h l d", h=self.num_heads) for t in (q, k, v))
        with no_autocast(x.device.type):
            dtype = q.dtype
            q, k, v = upcast(q, k, v)
            attn = self.dropout((q @ k.mT * q.shape[-1] ** -0.5).softmax(dim=-1))
            out = (attn @ v).to(dtype)
        return self.out_proj(rearrange(out, "n h l d -> n l (h d)"))


class TransformerLayer(nn.Module):
    """Pre-norm attention and feed-forward; `last_only` returns only the window's last token."""

    def __init__(self, dim: int, num_heads: int, ff_hidden_dim: int, dropout: float):
        super().__init__()
        self.norm1 = nn.RMSNorm(dim)
        self.norm2 = nn.RMSNorm(dim)
        self.attn = WindowAttention(dim, num_heads, dropout)
        fc1, fc2 = nn.Linear(dim, ff_hidden_dim), nn.Linear(ff_hidden_dim, dim)
        self.ff = nn.ModuleDict({"fc1": fc1, "fc2": fc2})
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, last_only: bool = False) -> Tensor:
        residual = x[:, -1:] if last_only else x
        x = residual + self.attn(self.norm1(x), last_only)
        hidden = self.dropout(F.gelu(self.ff["fc1"](self.norm2(x))))
        return x + self.dropout(self.ff["fc2"](hidden))


class CompressTransformer(Started):
    """A transformer over the `l` tokens of each window. Its last token is the result.

    A token is the concatenation of the heads, so `dim` is `h * d` of the input. The transformer
    adds no positions; `SparseAttention` adds intra-block positions before. Without these, the order
    of tokens before the last does not matter.

    Args:
        num_layers: layers, at least 1.
        dim: width of a token, KV heads times head width.
        num_heads: heads of the attention inside a window; divides `dim`.
        ff_hidden_dim: hidden width of the feed-forward, by default `4 * dim`.
        dropout: probability, on attention weights and in the feed-forward, while training.
    """

    def __init__(
        self,
        num_layers: int,
        dim: int,
        num_heads: int,
        ff_hidden_dim: int | None = None,
        dropout: float = 0.0,
    ):
        super().__init__()
        check_ints(1, num_layers=num_layers, dim=dim, num_heads=num_heads)
        if dim % num_heads:
            raise ValueError(f"num_heads must divide dim={dim}, got {num_heads}")
        width = 4 * dim if ff_hidden_dim is None else check_int("ff_hidden_dim", ff_hidden_dim, 1)
        dropout = check_number("dropout", dropout, "in [0, 1]", 0.0, 1.0)
        self.dim = dim
        self.layers = nn.ModuleList(
            TransformerLayer(dim, num_heads, width, dropout) for _ in range(num_layers)
        )

    def forward(self, kv: Tensor) -> Tensor:
        b, h, w, _, d = kv.shape
        if h * d != self.dim:
            raise ValueError(f"kv must have h * d = dim = {self.dim}, got h={h} and d={d}")
        # under autocast kv may be narrower than the weights; the residual keeps their precision
        x = kv.to(torch.promote_types(kv.dtype, next(self.parameters()).dtype))
        x = rearrange(x, "b h w l d -> (b w) l (h d)")
        for layer in self.layers[:-1]:
            x = layer(x)
        x = self.layers[-1](x, last_only=True)
        return rearrange(x, "(b w) 1 (h d) -> b h w d", b=b, w=w, h=h).to(kv.dtype)


def choose_network(config: NSAConfig, network: nn.Module | None) -> nn.Module:
    has_branch = "compressed" in config.branches
    if network is None and not has_branch:
        return MeanPool()
    if network is None:
        l, dim_head = config.compress_block_size, config.dim_head
        factor = config.compress_mlp_expand_factor
        check_hidden("compress_mlp_expand_factor", factor, l * dim_head)
        return default_compress_mlp(dim_head, l, factor)
    check_type("compress_mlp", network, nn.Module, "an nn.Module or None")
    if config.is_indexed:
        raise ValueError("compress_mlp must be None with importance='index', whose keys learn")
    gets_gradient = has_branch or (config.ranks and config.use_diff_topk)
    if not gets_gradient and any(p.requires_grad for p in network.parameters()):
        raise ValueError(  # no gradient would reach them
            "compress_mlp must have no parameters to train where compressed keys only rank "
            "blocks and use_diff_topk=False: give MeanPool() or freeze it"
        )
    return network


def slides(network: Any) -> bool:
    """Whether `compress_segments` can replace `forward`: not for a derived class or a network with
    hooks."""
    return type(network) in (MeanPool, SumPool) and not (
        network._forward_hooks or network._forward_pre_hooks or network._backward_hooks
        or network._backward_pre_hooks or "forward" in network.__dict__
    )  # fmt: skip


# the network and the positions [h l d] of keys "k" and of values "v"
Networks = dict[str, tuple[Any, Tensor | None]]


def compress_windows(windows: dict[str, Tensor], networks: Networks) -> dict[str, Tensor]:
    """Summaries [b h w d] of windows [b h w l d] of "k" and "v", as "ck" and "cv"."""
    compressed = {}
    for name, t in windows.items():
        network, positions = networks[name]
        if positions is not None:
            t = t + positions.to(t.dtype)[:, None]
        b, h, w, _, d = t.shape
        summary = compressed[f"c{name}"] = network(t).to(t.dtype)
        if summary.shape != (b, h, w, d):
            got = f"{list(t.shape)} to {list(summary.shape)}"
            raise ValueError(f"compress_mlp must map [b h w l d] to [b h w d], got {got}")
    return compressed


def compress_sequences(
    raw: dict[str, Tensor], networks: Networks, config: AttentionConfig, documents: Documents | None
) -> dict[str, Tensor]:
    """`compress_windows` of whole sequences [b h n d]. Sliding networks read the sequence without
    copying windows."""
    if not raw:
        return {}
    l, d, causal = config.compress_block_size, config.d, config.causal
    n = blocks.num_windows(raw["k"].shape[2], d, causal=causal)
    nets, positions = zip(*(networks[name] for name in raw), strict=True)
    if is_exporting() or documents is not None or l % d or not all(slides(net) for net in nets):
        count = free_size(n) if is_exporting() else None
        windows = {name: windows_of(t, l, d, causal, documents, count) for name, t in raw.items()}
        return compress_windows(windows, networks)
    compressed = {}
    for (name, t), net, p in zip(raw.items(), nets, positions, strict=True):
        segments = windowed(t, d, d, causal).narrow(2, 0, n * d).unflatten(2, (n, d))
        summary = net.compress_segments(segments, l // d)
        if p is not None:
            summary = summary + net(p.to(t.dtype)[None, :, None])
        compressed[f"c{name}"] = summary.to(t.dtype)
    return compressed


def unfold(t: Tensor, l: int, d: int) -> Tensor:
    """Windows of l tokens, d apart: [b h n d] -> [b h w l d], views."""
    if t.shape[2] < l:
        return t.new_zeros(*t.shape[:2], 0, l, t.shape[3])
    return t.unfold(2, l, d).transpose(-2, -1)


def windowed(t: Tensor, l: int, d: int, causal: bool) -> Tensor:
    """Pad whole sequences [b h n d] with the zeros of their first and last windows."""
    n = t.shape[2]
    end = n if causal else blocks.num_windows(n, d, causal=False) * d
    left, right = l - d, end - n
    # F.pad copies even with no padding; a compiled graph must not branch on `right`
    pads = left or torch.compiler.is_compiling() or right
    return F.pad(t, (0, 0, left, right)) if pads else t


def windows_of(
    t: Tensor, l: int, d: int, causal: bool, documents: Documents | None = None,
    count: int | None = None,
) -> Tensor:  # fmt: skip
    """Windows [b h w l d] of whole sequences [b h n d]. Tokens outside of the sequence, or of the
    document that a window ends in, are zeros. `count`: w, if it is a `free_size`."""
    windows = windowed(t, l, d, causal)
    if count is None:
        windows = unfold(windows, l, d)
    else:  # the same as a copy
        begins = torch.arange(count, device=t.device)[:, None] * d
        index = begins + torch.arange(l, device=t.device)
        windows = windows.index_select(2, index.flatten()).unflatten(2, (count, l))
    # causally no query sees a window that its document does not fill
    if documents is None or (causal and l == d):
        return windows
    w = windows.shape[2]
    segment = torch.arange(w, device=t.device)[:, None] * d
    token = segment + torch.arange(d - l, d, device=t.device)
    first, last = (bound[:, : w * d : d, None] for bound in documents)
    is_visible = (token >= first) & (token < last)
    return windows.masked_fill(~is_visible[:, None, :, :, None], 0)
