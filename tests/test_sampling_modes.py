"""Sampling leaves every module in the mode that it was in, whatever happens; and token ids of any
integral dtype."""

import itertools

import pytest
import torch

from native_sparse_attention import Transformer
from native_sparse_attention.compress import CompressTransformer
from native_sparse_attention.generate import sample_token

INTEGERS = [torch.uint8, torch.int16, torch.int32]


def model(use_sparse_attn=True):
    sparse = dict(
        sliding_window_size=8, compress_block_size=8, selection_block_size=8,
        num_selected_blocks=2, compress_mlp=CompressTransformer(1, 16, 2, dropout=0.5),
    )  # fmt: skip
    more = dict(sparse_attn_kwargs=sparse) if use_sparse_attn else {}
    return Transformer(64, 16, 2, dim_head=8, heads=2, use_sparse_attn=use_sparse_attn, **more)


def modes(net):
    return {name: module.training for name, module in net.named_modules()}


def everything_trained(net):
    net.train()


def frozen_part(net):
    net.train()
    net.layers[0].eval()
    net.layers[0][1].train()


def part_of_a_part(net):
    net.train()
    for module in itertools.islice(net.modules(), 3, None, 2):
        module.training = False


def dropout_in_a_model_of_eval_mode(net):
    net.eval()
    net.layers[1].train()


MODES = [everything_trained, frozen_part, part_of_a_part, dropout_in_a_model_of_eval_mode]


@pytest.mark.slow(one_of=2)
@pytest.mark.parametrize("use_cache_kv", [True, False])
@pytest.mark.parametrize("setting", MODES)
def test_modes_are_as_before(setting, use_cache_kv):
    """After a text, between its tokens, and of a stream that nobody reads to its end."""
    net, ids = model(), torch.randint(0, 64, (1, 10))
    setting(net)
    before, call = modes(net), dict(use_cache_kv=use_cache_kv)
    net.sample(ids, 22, **call)
    assert modes(net) == before
    first, second = net.stream(ids, 22, **call), net.stream(ids, 30, **call)
    for _ in range(3):
        next(first), next(second)
        assert modes(net) == before
    first.close()
    del second
    assert modes(net) == before


@pytest.mark.parametrize("use_cache_kv", [True, False])
def test_modes_after_an_error(use_cache_kv):
    """At the prompt, and at a later token."""
    net, ids = model(), torch.randint(0, 64, (1, 10))
    frozen_part(net)
    before, calls = modes(net), []

    def fail(module, args):
        assert not module.training
        calls.append(module)
        if len(calls) in (1, 4):
            raise KeyboardInterrupt

    with net.norm.register_forward_pre_hook(fail):
        for _ in range(2):
            with pytest.raises(KeyboardInterrupt):
                net.sample(ids, 22, use_cache_kv=use_cache_kv)
            assert modes(net) == before
    assert len(calls) == 4


def test_a_module_with_a_mode_of_its_own():
    """As one that folds weights for eval mode: it is told, by `train`, of each change."""

    class Folds(torch.nn.Linear):
        folded = False

        def train(self, mode=True):
            self.folded = not mode
            return super().train(mode)

        def forward(self, x):
            assert self.folded != self.training
            return super().forward(x)

    net = model()
    net.to_logits, net.layers[0][1][1] = Folds(16, 64), Folds(16, 64)
    net.train()
    net.layers[0].eval()
    net.sample(torch.randint(0, 64, (1, 10)), 14)
    assert net.to_logits.training and not net.to_logits.folded
    assert not net.layers[0][1][1].training and net.layers[0][1][1].folded


def test_tied_modules():
    net = model()
    net.layers[1][1] = net.layers[0][1]
    net.train()
    net.layers[0].eval()
    before = modes(net)
    net.sample(torch.randint(0, 64, (1, 10)), 14)
    assert modes(net) == before


@pytest.mark.parametrize("use_sparse_attn", [True, False])
def test_ids_of_any_integral_dtype(use_sparse_attn):
    net, ids = model(use_sparse_attn).eval(), torch.randint(0, 64, (2, 24))
    segments = torch.arange(24).expand(2, -1) // 9
    lengths, bounds = torch.tensor([24, 17]), torch.tensor([0, 5, 24])

    def chunks(t, dtype):
        cache = net.new_cache(max_length=32)
        first = net(t[:, :20], cache=cache, lengths=lengths.to(dtype) - 4)
        return torch.cat((first, net(t[:, 20:], cache=cache)), dim=1)

    calls = {
        "logits": lambda t, dtype: net(t),
        "loss": lambda t, dtype: net(t, return_loss=True),
        "chunks": chunks,
        "loss of documents": lambda t, dtype: net(t, True, segment_ids=segments.int()),
        "bounds": lambda t, dtype: net(t[:1], True, cu_seqlens=bounds.int()),
        "loss of padded rows": lambda t, dtype: net(t, True, mask=segments > 0),
        "sample": lambda t, dtype: net.sample(
            t[:, :9], 14, temperature=0.0, prompt_lengths=lengths.to(dtype) - 15
        ),
        "sample without a cache": lambda t, dtype: net.sample(
            t[:, :9], 14, temperature=0.0, use_cache_kv=False
        ),
        "stop": lambda t, dtype: net.sample(t[:, :9], 14, temperature=0.0, stop_tokens=[3, 63]),
        "stream": lambda t, dtype: torch.stack(list(net.stream(t[:, :9], 14, temperature=0.0))),
        "nothing to sample": lambda t, dtype: net.sample(t, 24),
    }
    for name, call in calls.items():
        with torch.no_grad():
            want = call(ids, torch.int64)
            for dtype in INTEGERS:
                got = call(ids.to(dtype), dtype)
                torch.testing.assert_close(got, want, atol=0.0, rtol=0.0, msg=f"{name}, {dtype}")


def test_gradients_of_a_loss_of_bytes():
    net, ids = model(False), torch.randint(0, 64, (2, 24), dtype=torch.uint8)
    grads = [
        torch.autograd.grad(net(t, return_loss=True), net.token_emb.weight)
        for t in (ids, ids.long())
    ]
    torch.testing.assert_close(*grads, atol=0.0, rtol=0.0)


@pytest.mark.parametrize("bad, got", [(torch.zeros(1, 5), "float32"), ([[1, 2]], "1, 2"),
                                      (torch.ones(1, 5, dtype=torch.bool), "bool")])  # fmt: skip
def test_ids_that_are_none(bad, got):
    net = model(False)
    kind = "a tensor of integers of shape \\[b, n\\]"
    with pytest.raises(ValueError, match=f"ids must be {kind}, got .*{got}"):
        net(bad)
    with pytest.raises(ValueError, match=f"prompt must be {kind}, got .*{got}"):
        net.sample(bad, 9)


@pytest.mark.parametrize("use_cache_kv", [True, False])
def test_the_caller_may_write_to_what_it_gave_and_got(use_cache_kv):
    torch.manual_seed(0)
    model = Transformer(16, 16, 1, 8, 2, use_sparse_attn=True)
    prompt = torch.randint(16, (2, 5))
    given = dict(temperature=0.0, use_cache_kv=use_cache_kv)
    expected, found = model.sample(prompt, 14, **given), []
    for token in model.stream(prompt, 14, **given):
        found.append(token.clone())
        token.fill_(0)
        prompt.fill_(0)
    assert torch.equal(torch.stack(found, dim=1), expected)


def test_the_fraction_of_tokens_is_not_rounded_up():
    """(1 - 0.7) * 10 is a little more than 3."""
    generator = torch.Generator().manual_seed(0)
    for count, threshold, kept in ((10, 0.7, 3), (10, 0.9, 1), (100, 0.71, 29), (10, 0.65, 4)):
        logits = torch.zeros(2000, count)
        drawn = sample_token(logits, 1.0, threshold, None, generator)
        assert len(drawn.unique()) == kept
