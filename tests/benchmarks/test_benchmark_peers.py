"""Published kernels from a checkout, on a CPU: small checkouts that have the interface of a peer,
in eager PyTorch, are loaded, called, held to the oracle, and refused."""

import argparse
import dataclasses
import sys

import pytest
import torch

from benchmarks import attention, peers
from benchmarks.problem import Setting

pytestmark = pytest.mark.usefixtures("nothing_to_release")

CPU = torch.device("cpu")
SIZES = dict(D=16, l=8, d=4, n=2, initial=1, local=2, w=31, dtype=torch.bfloat16)
SMALL = Setting(200, 4, 2, s=32, **SIZES)

EAGER = """
import torch


def attend(q, k, v, mask, scale):
    group = q.shape[1] // k.shape[1]
    k, v = (t.repeat_interleave(group, 1).float() for t in (k, v))
    sim = torch.einsum("ihd,jhd->hij", q.float(), k) * scale
    seen = mask.any(-1, keepdim=True)
    probs = sim.masked_fill(~mask, float("-inf")).masked_fill(~seen, 0.0).softmax(-1)
    return torch.einsum("hij,jhd->ihd", probs * seen, v).to(q.dtype)


def causal(T):
    return torch.ones(T, T, dtype=torch.bool).tril()


def selected(q, k, v, blocks, size, scale):
    T, none = len(q), -(-len(q) // size)
    blocks = torch.where((blocks >= 0) & (blocks < none), blocks, none).long()
    chosen = torch.zeros(*blocks.shape[:2], none + 1, dtype=torch.bool).scatter_(-1, blocks, True)
    mask = chosen[..., torch.arange(T) // size] & causal(T)
    return attend(q, k, v, mask.repeat_interleave(q.shape[1] // k.shape[1], 0), scale)
"""

FSA = """
from .eager import selected


def FSA_topk_sparse_attention(q, k, v, topk_idx, block_size, cu_seqlens, softmax_scale=None):
    assert cu_seqlens.tolist() == [0, len(q)] and topk_idx.max() < len(q) / block_size
    return selected(q, k, v, topk_idx, block_size, softmax_scale)
"""

NSA = """
import torch

from .eager import attend, causal, selected


class NSAHelper:
    x_cu_seqlens = None

    @classmethod
    def set_hyperparameters(cls, **settings):
        cls.settings = settings

    @classmethod
    def init_cu_seqlens(cls, x_cu_seqlens):
        assert cls.x_cu_seqlens is None
        cls.x_cu_seqlens = x_cu_seqlens


def compress_attn(q, k, v, sm_scale=None):
    l, d = (NSAHelper.settings[name] for name in ("kernel_size", "stride"))
    assert len(k) == (len(q) - l) // d + 1
    mask = torch.arange(len(q))[:, None] >= torch.arange(len(k)) * d + l - 1
    return attend(q, k, v, mask.expand(q.shape[1], -1, -1), sm_scale), None


def slc_topk_indices(q, k, lse, sm_scale=None, maybe_efficient_version=False, scale_slc_p=True):
    size, n = (NSAHelper.settings[name] for name in ("block_size", "top_n"))
    own = torch.arange(len(q))[:, None] // size
    blocks = own - torch.arange(n)
    blocks = torch.where(blocks >= 0, blocks, -(-len(q) // size))
    return blocks.int().expand(k.shape[1], -1, -1), None


def select_attn(q, k, v, topk, sm_scale=None):
    assert topk.shape[-1] == NSAHelper.settings["top_n"] and topk.min() >= 0
    return selected(q, k, v, topk, NSAHelper.settings["block_size"], sm_scale)
"""

FILES = {
    "fsa/ops/__init__.py": FSA,
    "fsa/ops/eager.py": EAGER,
    "flash_nsa/__init__.py": NSA,
    "flash_nsa/eager.py": EAGER,
}


def forget() -> None:
    for name in list(sys.modules):
        if name.partition(".")[0] in peers.PEERS:
            del sys.modules[name]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A checkout that holds every peer, which CPUs may run."""
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(peers.Peer, "devices", ("cpu", "cuda"))
    monkeypatch.setattr(peers, "HALF", (torch.bfloat16, torch.float32))
    forget()
    yield tmp_path
    forget()


def verify(provider, setting, spot=False):
    assert provider.why_not(setting, CPU) is None
    x = attention.prepared(provider, setting, CPU)
    return attention.verify(
        provider, x, setting, attention.spot_rows(setting.T, CPU) if spot else None
    )


@pytest.mark.parametrize("spot", [False, True])
@pytest.mark.parametrize(
    ("kind", "setting"),
    [
        (peers.Fsa, SMALL),
        (peers.Fsa, dataclasses.replace(SMALL, T=70, K=4)),
        *((kind, dataclasses.replace(SMALL, s=16)) for kind in peers.PEERS["flash_nsa"]),
    ],
)
def test_adapters_call_their_peers_rightly(kind, setting, spot, folder):
    assert 0 < verify(kind(folder), setting, spot) <= 1


def test_end_to_end(folder, tmp_path):
    """Rows of a peer's parts beside those of ours, and of a setting that one refuses."""
    options = ["--peer", f"flash_nsa={folder}", f"fsa={folder}", "--lengths", "96", "--heads"]
    options += ["4/2", "--device", "cpu", "--seconds", "1e-4", "--strides", "1", "--check-length"]
    rows = attention.main([*options, "96", "--out", str(tmp_path / "rows.jsonl")])
    timed = {(row["provider"], row["part"]) for row in rows if "p50_ms" in row}
    assert timed == {("ours", "whole"), ("ours", "selected"), ("flash_nsa", "whole")}
    for row in rows:
        if row["provider"] == "flash_nsa":
            assert row["times_ours"] > 0 and "mdy666" in row["note"] and row["error_share"] <= 1
    (refused,) = (row for row in rows if row["provider"] == "fsa")
    assert refused["refused"] == "fsa takes blocks of 32, 64, 128 or 256 tokens, not 16"
    assert "failed" not in refused and "p50_ms" not in refused


def test_a_peer_that_computes_something_else_is_not_timed(folder):
    text = FSA.replace("softmax_scale)\n", "softmax_scale * 1.05)\n")
    (folder / "fsa/ops/__init__.py").write_text(text)
    (row,) = attention.Timer(96, 1e-4, CPU).rows(peers.Fsa(folder), SMALL)
    assert row["failed"].startswith("wrong: out errs by")


def test_refusals(tmp_path, monkeypatch):
    whole = Setting(8192, 64, 4)
    cuda = torch.device("cuda")
    expected = {
        peers.Fsa: ({"s": 16}, "fsa takes blocks of 32, 64, 128 or 256 tokens, not 16"),
        peers.FlashNsa: ({"D": 96}, "flash_nsa takes powers of two for D, not 96"),
    }
    for kind, (change, reason) in expected.items():
        assert kind(tmp_path).why_not(dataclasses.replace(whole, **change), cuda) == reason
    assert peers.Fsa(tmp_path).why_not(whole, CPU) == "fsa needs cuda"


def test_what_is_imported_comes_from_the_checkout(folder, tmp_path):
    empty = tmp_path / "empty"
    empty.mkdir()
    reason = peers.Fsa(empty).why_not(SMALL, CPU)
    assert reason.startswith("fsa.ops cannot be imported: ModuleNotFoundError")
    before = list(sys.path)
    peers.Fsa(folder).load()
    assert sys.path == before
    # now there is one, but of another folder
    reason = peers.Fsa(empty).why_not(SMALL, CPU)
    assert reason.endswith("fsa.ops was imported from elsewhere")


def test_checkouts_are_named_on_the_command_line(tmp_path):
    assert [type(peer) for peer in peers.checkout(f"fsa={tmp_path}")] == [peers.Fsa]
    for text in ("fsa", "fsa=", f"other={tmp_path}"):
        with pytest.raises(argparse.ArgumentTypeError, match="expected NAME=PATH, NAME one of"):
            peers.checkout(text)
    with pytest.raises(argparse.ArgumentTypeError, match="there is no folder"):
        peers.checkout(f"fsa={tmp_path / 'missing'}")


def test_every_block():
    """Query 6 has its own block 3, the one before it, the first, and the ranked block 1."""
    setting = Setting(7, 1, 1, D=4, s=2, n=2, initial=1, local=2)
    indices = torch.full((1, 7, 1, 2), -1)
    indices[0, 6, 0, 0] = 1
    blocks = peers.every_block(indices, setting)
    assert blocks.dtype == torch.int32 and blocks.shape == (1, 7, 5)
    assert blocks[0, 6].tolist() == [0, 1, 2, 3, 4]
    assert blocks[0, 0].tolist() == [0, 4, 4, 4, 4] and blocks[0, 3].tolist() == [0, 1, 4, 4, 4]


@pytest.mark.parametrize("s", [64, 128])
def test_peers_are_timed_at_8k_and_64k_beside_ours(s, tmp_path):
    options = ["--device", "cuda", "--heads", "64/4", "--block-size", str(s)]
    args = attention.BENCHMARK.arguments([*options, "--peer", f"fsa={tmp_path}"])
    settings = [(setting.T, setting.s) for setting in attention.settings_of(args)]
    assert settings == [(8192, s), (65536, s)]
    names = [(provider.name, provider.part) for provider in attention.providers_of(args)]
    baseline = [("dense-cudnn", "whole"), ("ours", "whole"), ("ours", "selected")]
    assert names == [*baseline, ("fsa", "selected")]
