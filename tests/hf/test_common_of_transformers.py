"""The tests that transformers runs on each of its models, on ours. They are in its repository, not
in its wheel: NSA_TRANSFORMERS_TESTS names a checkout of the installed release. Needs the package
parameterized."""

import importlib
import os
import unittest
import warnings
from pathlib import Path

import pytest
import torch

CHECKOUT = os.environ.get("NSA_TRANSFORMERS_TESTS")
if not CHECKOUT:
    pytest.skip("NSA_TRANSFORMERS_TESTS names no checkout", allow_module_level=True)
pytest.importorskip("parameterized")

from transformers.models.auto import modeling_auto

import tests.helpers
from native_sparse_attention.hf import NSAForCausalLM, NSAModel, NSAModelConfig
from native_sparse_attention.hf.cache import KVLayer

pytestmark = pytest.mark.filterwarnings("ignore")
# which classes have a loss, by name
modeling_auto.MODEL_MAPPING_NAMES["nsa"] = "NSAModel"
modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES["nsa"] = "NSAForCausalLM"


def mixins():
    """Theirs is a package `tests` too."""
    tests.__path__ = [*tests.__path__, str(Path(CHECKOUT) / "tests")]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # marks that our settings do not know
        common = importlib.import_module("tests.test_modeling_common")
        generation = importlib.import_module("tests.generation.test_utils")
    return common.ModelTesterMixin, generation.GenerationTesterMixin


class Sizes:
    """What the mixins ask of a model: sizes, a configuration and inputs."""

    batch_size, seq_length, is_training = 5, 7, True
    vocab_size, hidden_size, num_hidden_layers = 99, 32, 2
    num_attention_heads = num_key_value_heads = 2

    def __init__(self, nsa, **settings):
        self.settings = dict(settings, nsa=nsa)

    def get_config(self):
        names = (
            "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads",
            "num_key_value_heads",
        )  # fmt: skip
        sizes = {name: getattr(self, name) for name in names}
        tokens = dict(pad_token_id=0, bos_token_id=1, eos_token_id=2)
        return NSAModelConfig(**sizes, **tokens, intermediate_size=32, **self.settings)

    def prepare_config_and_inputs_for_common(self):
        ids = torch.randint(3, self.vocab_size, (self.batch_size, self.seq_length))
        return self.get_config(), dict(input_ids=ids, attention_mask=torch.ones_like(ids).tril(2))


class Common(*mixins()):
    all_model_classes = (NSAModel, NSAForCausalLM)
    has_attentions = False
    test_torch_exportable = False  # these export a forward over a cache
    _torch_compile_train_cls = NSAForCausalLM

    def _check_past_key_values_for_generate(
        self, batch_size, past_key_values=None, seq_length=None, config=None, cache=None
    ):
        """Its layers have a form of their own."""
        for layer in (past_key_values or cache).layers:
            assert isinstance(layer, KVLayer) and layer.slots == seq_length
            assert len(layer.cache.lengths) == batch_size

    _check_cache_for_generate = _check_past_key_values_for_generate


class TestOneSoftmax(Common, unittest.TestCase):
    def setUp(self):
        small = dict(selection_block_size=2, num_selected_blocks=1, num_local_blocks=1)
        self.model_tester = Sizes(dict(preset="one-softmax", **small))


class TestThreeBranches(Common, unittest.TestCase):
    def setUp(self):
        windows = dict(compress_block_size=4, compress_block_sliding_stride=2)
        blocks = dict(selection_block_size=4, num_selected_blocks=1, sliding_window_size=3)
        self.model_tester = Sizes(dict(preset="paper", **windows, **blocks), dense_layers=[0])


class TestLearnedRanking(Common, unittest.TestCase):
    def setUp(self):
        small = dict(selection_block_size=2, num_selected_blocks=1, num_local_blocks=1)
        nsa = dict(preset="one-softmax", importance="index", **small)
        self.model_tester = Sizes(nsa, ranking_queries=4, qk_norm=True)
