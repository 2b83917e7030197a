"""Rankings that tokens share (`selection_stride`, two stages) over a `SparseCache`."""

import copy

import pytest
import torch

from native_sparse_attention import hf
from tests.helpers import batches
from tests.helpers import tiny_models as models
from tests.helpers.sizes import sizes

WINDOWS = dict(compress_block_size=4, compress_block_sliding_stride=2)
FORMS = dict(
    tokens={},
    logits=dict(WINDOWS, importance="logits", query_heads_share_selected_kv=False),
    probs=dict(WINDOWS, importance="probs", dense_length=20),
    stages=sizes(
        2, 2, 2, selection_stride=1, num_local_blocks=4, num_initial_blocks=0, num_selected_groups=1
    ),
    many_gates=dict(num_selected_blocks=70, use_diff_topk=True, selection_stride=2),
)
SLOW = [pytest.mark.kernels, pytest.mark.slow(one_of=2)]


@pytest.mark.parametrize(
    "form, left",
    [(form, left) for form in FORMS for left in (True, False)]
    + [pytest.param(form, True, marks=SLOW) for form in ("kernels", "stages_kernels")],
)
def test_pieces_are_one_forward(form, left, monkeypatch):
    """With a crop of as many tokens as may be, rows that move, a copy and gradients."""
    monkeypatch.setattr(hf.cache, "RANKED_TOKENS", 11)
    has_kernels, settings = "kernels" in form, FORMS.get(form.removesuffix("_kernels"), {})
    model = models.tiny(num_hidden_layers=2 - has_kernels)
    hf.use_sparse_attention(model, **models.SPARSE | dict(selection_stride=4) | settings)
    batch, cache = batches.padded(models.prompts(30, 42), left), hf.SparseCache(model.config)
    pieces = batches.call_in_pieces
    others = batch | dict(input_ids=batch["input_ids"].flip(0, 1))
    expected = model(**batch, use_cache=False).logits
    with torch.set_grad_enabled(form == "tokens"):
        outs = [pieces(model, batch, cache, *((0, 27) if left else (0, 7, 18)), 29)]
        pieces(model, others, cache, 29, 34, 36, 37, 39)
        cache.crop(-10)
        cache.batch_repeat_interleave(2)
        cache.reorder_cache(torch.tensor([1, 3, 2, 0]))
        cache.batch_select_indices(torch.tensor([2, 3]))
        model.config.nsa_config["backend"] = "triton" if has_kernels else "eager"
        turned = {name: t.flip(0) for name, t in batch.items()}
        outs.append(pieces(model, turned, cache, 29, 30, 31).flip(0))
        cache = cache if form == "tokens" else copy.deepcopy(cache)
        outs.append(pieces(model, turned, cache, 31, 35, 36, 37, 38, 42).flip(0))
    out, real = torch.cat(outs, dim=1), batch["attention_mask"].bool()
    models.close(out[real], expected[real])
    if form == "tokens":
        losses = [t[real].square().mean() for t in (out, expected)]
        models.close(*(torch.autograd.grad(loss, [*model.parameters()]) for loss in losses))
        return
    cache.crop(-11)
    assert pieces(model, batch, cache, 31, 32).isfinite().all()  # its first token ranks


@pytest.mark.parametrize("change", [None, dict(selection_block_size=16)], ids=str)
@torch.no_grad()
def test_tokens_that_other_settings_read_have_no_rankings(change):
    """The first token after them ranks, as over a cache that keeps none."""
    (ids,), outs = models.prompts(118), []
    settings = models.SPARSE | dict(selection_stride=8, selection_block_size=8)
    for kind in (batches.dynamic, lambda model: hf.SparseCache(model.config)):
        model = hf.use_sparse_attention(models.tiny(), **settings)
        cache = kind(model)
        batches.call(model, ids[:, : 35 if change is None else 117], cache)
        if change is None:
            batches.call(hf.use_dense_attention(model), ids[:, 35:117], cache)
        hf.use_sparse_attention(model, **settings | (change or {}))
        outs.append(batches.call(model, ids[:, 117:], cache))
    models.close(*outs)


@pytest.mark.parametrize("way", [dict(num_beams=3), dict(prompt_lookup_num_tokens=3)], ids=str)
@torch.no_grad()
def test_generate(way):
    settings = models.SPARSE | dict(dense_length=24, selection_stride=4)
    model, (text,) = hf.use_sparse_attention(models.tiny(), **settings), models.prompts(22)
    given = dict(attention_mask=torch.ones_like(text), do_sample=False, max_new_tokens=19)
    beams = {name: n for name, n in way.items() if name == "num_beams"}
    expected = model.generate(text, **given, **beams, use_cache=False)
    with torch.inference_mode():
        cache = {batches.CACHE: hf.SparseCache(model.config)}
        assert model.generate(text, **given, **way, **cache).equal(expected)


@pytest.mark.parametrize("backend", ["eager", pytest.param("triton", marks=SLOW)])
@pytest.mark.parametrize("kind", ["dynamic", "static", "cropped"])
@torch.no_grad()
def test_caches_without_rankings(kind, backend):
    """A step ranks for itself: tokens of a block, as every token does, and of the groups that its
    token finds, where these are all, each block."""
    (ids,) = models.prompts(42)
    for shared in (dict(selection_stride=4), FORMS["stages"] | dict(num_selected_groups=9)):
        alone = dict(shared, selection_stride=1, num_selected_groups=0)
        alone |= dict.fromkeys(("compress_block_size", "compress_block_sliding_stride"), 1)
        model = models.tiny(num_hidden_layers=1)  # whose keys are no outputs of blocks
        expected = hf.use_sparse_attention(model, **models.SPARSE | alone)(ids).logits
        hf.use_sparse_attention(model, **models.SPARSE | shared, backend="eager")
        cache = batches.dynamic(model) if kind == "dynamic" else hf.SparseCache(model.config)
        if kind == "static":
            cache = hf.StaticSparseCache(model.config, 48)
        batches.call(model, ids[:, :38], cache)
        model.config.nsa_config["backend"] = backend
        for token in range(38, 42):
            if kind == "cropped":
                for layer in cache.layers:
                    layer.rankings.clear()
            out = batches.call(model, ids[:, token : token + 1], cache)
            models.close(out[:, 0], expected[:, token])
