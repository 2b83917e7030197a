"""The part of a layer that compresses: windows of tokens become compressed keys and values.

b  batch            n  tokens         h  KV heads
w  windows          l  tokens of a window                d  head dimension
"""

from __future__ import annotations

from typing import Any

import torch
from einops import rearrange
from torch import Tensor, nn
from torch.nn import Module

from . import blocks
from .checks.networks import check_compress_mlp, copied
from .checks.scalars import check_hidden
from .compress import (
    MeanPool,
    SumPool,
    count_freely,
    default_compress_mlp,
    slide,
    slides,
    windowed,
    windows_of,
)
from .config import NSAConfig
from .frequencies import RotaryLayer
from .ops.triton.elementwise import compress_mean_keys, compress_means
from .varlen import Documents


class CompressionLayer(RotaryLayer):
    """A layer with `config`, whose compressed keys and values are a branch or only rank blocks."""

    twins: tuple[str, ...] = ("k_compress", "v_compress")
    config: NSAConfig
    compress_mem_kv: Any
    to_index: Any
    k_compress: Any
    v_compress: Any
    k_intrablock_positions: Any
    v_intrablock_positions: Any

    def make_memory(self) -> nn.Parameter | None:
        """The memory slots [2 k m d] of the compressed branch."""
        config = self.config
        m = config.num_compressed_mem_kv
        if "compressed" not in config.branches:
            return None
        memory = torch.zeros(2, config.kv_heads, m, config.dim_head)
        if m:
            return nn.Parameter(memory)
        # empty: a parameter would get no gradient; checkpoints have the name
        self.register_buffer("compress_mem_kv", memory)
        return self.compress_mem_kv

    def make_compression(self, network: Module | None) -> None:
        """The networks of windows and their positions. Compressed keys that only rank blocks have
        no values, and without a network to train no positions."""
        config = self.config
        l, dim_head, kv_heads = (
            config.compress_block_size,
            config.dim_head,
            config.kv_heads,
        )
        has_branch = "compressed" in config.branches
        if network is None and has_branch:
            factor = config.compress_mlp_expand_factor
            check_hidden("compress_mlp_expand_factor", factor, l * dim_head)
            network = default_compress_mlp(dim_head, l, factor)
        elif network is None:
            network = MeanPool()
        elif config.importance == "index":
            raise ValueError("compress_mlp must be None with importance='index', whose keys learn")
        else:
            gets_gradient = has_branch or (config.ranks and config.use_diff_topk)
            check_compress_mlp(network, kv_heads, l, dim_head, gets_gradient)
        learns = has_branch or any(p.requires_grad for p in network.parameters())

        def positions(exist: bool) -> nn.Parameter | None:
            return nn.Parameter(torch.zeros(kv_heads, l, dim_head)) if exist else None

        self.k_intrablock_positions = positions(learns)
        self.v_intrablock_positions = positions(has_branch)
        self.k_compress = copied(network) if config.compresses else None
        self.v_compress = copied(network) if has_branch else None
        if not has_branch:
            self.twins = ()

    def memory(self, dtype: torch.dtype) -> dict[str, Any]:
        if self.compress_mem_kv is None or self.config.num_compressed_mem_kv == 0:
            return {"mem_k": None, "mem_v": None}
        mem_k, mem_v = self.compress_mem_kv.to(dtype)
        return {"mem_k": mem_k, "mem_v": mem_v}

    def compress_whole(
        self,
        raw: dict[str, Tensor],
        documents: Documents | None,
        backend: str,
    ) -> dict[str, Tensor]:
        """Summaries of whole sequences "k" and "v" [b h n d]. Sliding networks read the sequence
        without copying windows; a kernel computes means."""
        config = self.config
        if not raw:
            return {}
        compressed: dict[str, Tensor] = {}
        l, d = config.compress_block_size, config.d
        nets: list[Any] = [net for net, _ in map(self.compressor, raw)]
        sliding: list[Any] = [net for net in nets if slides(net)]
        count = count_freely(raw["k"].shape[2], d, config.causal)
        if count is not None or documents is not None or l % d or len(sliding) < len(raw):
            windows = {
                n: windows_of(t, l, d, config.causal, documents, count) for n, t in raw.items()
            }
            return self.compress(windows)
        k, v = raw["k"], raw.get("v")
        if backend == "triton" and all(isinstance(net, (MeanPool, SumPool)) for net in sliding):
            n = blocks.num_windows(k.shape[2], d, causal=config.causal)
            if v is not None:
                positions = self.k_intrablock_positions, self.v_intrablock_positions
                means = compress_means(k, v, *positions, l, d, n)
                for name, mean, net in zip(("ck", "cv"), means, sliding, strict=True):
                    is_sum = isinstance(net, SumPool)
                    compressed[name] = mean * (l * net.gain).to(mean.dtype) if is_sum else mean
                return compressed
            averaged = (
                all(isinstance(net, MeanPool) for net in sliding) and not config.use_diff_topk
            )
            if averaged and (self.to_index is None or not torch.is_grad_enabled()):
                return {"ck": compress_mean_keys(k.detach(), l, d, n)}
        for (name, t), net in zip(raw.items(), sliding, strict=True):
            _, p = self.compressor(name)
            compressed[f"c{name}"] = slide(net, windowed(t, l, d, config.causal), p, l, d)
        return compressed

    def ranks_by_tokens(self) -> bool:
        """Whether the keys that rank blocks are the rotated keys themselves."""
        config = self.config
        sizes = config.compress_block_size, config.d
        plain = config.rank_rotated and sizes == (1, 1) and config.compresses
        plain = plain and self.to_index is None
        return plain and isinstance(self.k_compress, MeanPool) and slides(self.k_compress)

    def compressor(self, name: str) -> tuple[Any, Tensor | None]:
        """The network and the positions of keys "k" or values "v"."""
        if name == "k":
            return self.k_compress, self.k_intrablock_positions
        return self.v_compress, self.v_intrablock_positions

    def compress(self, windows: dict[str, Tensor]) -> dict[str, Tensor]:
        """Summaries [b h w d] of windows [b h w l d], as "ck" and "cv"."""
        compressed = {}
        for name, t in windows.items():
            network, positions = self.compressor(name)
            if positions is not None:
                t = t + rearrange(positions.to(t.dtype), "h l d -> h 1 l d")
            b, h, w, _, d = t.shape
            found = compressed[f"c{name}"] = network(t).to(t.dtype)
            if found.shape != (b, h, w, d):
                raise ValueError(
                    "compress_mlp must map [b h w l d] to [b h w d], "
                    f"got {list(t.shape)} to {list(found.shape)}"
                )
        return compressed
