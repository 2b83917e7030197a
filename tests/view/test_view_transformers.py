"""`python -m native_sparse_attention.view` on models of transformers, and the texts of tokens."""

import json
import shutil
import sys
from importlib import metadata

import pytest
import torch

from native_sparse_attention.view import page, token_texts
from native_sparse_attention.view.__main__ import main
from tests.helpers.tiny_models import SPARSE, native, of_parts, tiny
from tests.view import test_view_command
from tests.view.test_page import content_of

tokenizers = pytest.importorskip("tokenizers", reason="needs the extra hf")
transformers = pytest.importorskip("transformers", reason="needs the extra hf")
hf = pytest.importorskip("native_sparse_attention.hf")
load_viewed = pytest.importorskip("native_sparse_attention.hf.convert").load_viewed

TEXT = "The bees dance: été 🐝 </script>\r\n\tA map is <b>.\n" * 4
VOCAB = 320
WINDOWS = dict(SPARSE, compress_block_size=4, compress_block_sliding_stride=2, importance="probs")


def byte_level():
    """Pairs of bytes, with a token at the beginning."""
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=VOCAB - 10, special_tokens=["<s>", "</s>"], initial_alphabet=alphabet,
        show_progress=False,
    )  # fmt: skip
    made.train_from_iterator(["the dance of bees is a map of the bees"], trainer)
    begin = tokenizers.processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    made.post_processor = begin
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, bos_token="<s>", eos_token="</s>"
    )


def words():
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(unk_token="[UNK]"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    trainer = tokenizers.trainers.WordLevelTrainer(special_tokens=["[UNK]"], show_progress=False)
    made.train_from_iterator(["the bees"], trainer)
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made, unk_token="[UNK]")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    there = tmp_path_factory.mktemp("models")
    made = {
        "dense": tiny("Qwen3", vocab_size=VOCAB),
        "drop-in": hf.use_sparse_attention(tiny("Gemma2", vocab_size=VOCAB), **WINDOWS),
        "converted": hf.convert(tiny("Llama", vocab_size=VOCAB), **SPARSE),
        "native": native("branches", vocab_size=VOCAB),
        "parts": of_parts(vocab_size=VOCAB),
        "refused": tiny("Cohere2", vocab_size=VOCAB),
    }
    hf.convert(made["parts"].get_decoder(), **SPARSE)
    for name, model in made.items():
        model.save_pretrained(there / name)
        byte_level().save_pretrained(there / name)
    made["dense"].save_pretrained(there / "without")
    (there / "other").mkdir()
    (there / "other" / "config.json").write_text("{}")
    for name, settings in (("encoder", transformers.T5Config()), ("unknown", None)):
        (there / name).mkdir()
        config = dict(model_type="bees") if settings is None else settings.to_dict()
        (there / name / "config.json").write_text(json.dumps(config))
    weights = "model.safetensors"
    shutil.copytree(there / "dense", there / "torn")
    (there / "torn" / weights).write_bytes((there / "dense" / weights).read_bytes()[:1000])
    shutil.copytree(there / "dense", there / "empty", ignore=shutil.ignore_patterns(weights))
    config = json.loads((there / "dense" / "config.json").read_text())
    shutil.copytree(there / "dense", there / "wide")
    (there / "wide" / "config.json").write_text(json.dumps(config | dict(intermediate_size=64)))
    (there / "broken.gguf").write_bytes(b"bees")
    (there / "text").write_text(TEXT, newline="")
    return there


def call(folder, name, *args):
    return test_view_command.call(folder / name, "--text", folder / "text", *args, main=main)


def told_error(capsys):
    return test_view_command.told_error(capsys, "native_sparse_attention.view")


def shown(texts):
    return "".join(text for text in texts if text != "·").replace("␍", "\r")


@pytest.mark.parametrize("name", ["dense", "drop-in", "converted", "native", "parts"])
def test_page_of_a_model(name, folder, tmp_path, capsys):
    out = tmp_path / "page.html"
    settings = ("--settings", json.dumps(SPARSE)) if name == "dense" else ()
    assert call(folder, name, "--out", out, *settings) == 0
    told = capsys.readouterr()
    content = out.read_text()
    data = content_of(content)
    assert told.err == "" and told.out.startswith(f"{out}: {len(data['texts'])} tokens; ")
    assert shown(data["texts"]) == "<s>" + TEXT
    numbers = [1] if name == "drop-in" else [0, 1]  # the first layer of Gemma2 has a window
    decoder = "model.language_model" if name == "parts" else "model"
    names = [f"{decoder}.layers.{number}.self_attn.attention" for number in numbers]
    assert [layer["name"] for layer in data["layers"]] == names
    assert all("ranked" in layer["kinds"] for layer in data["layers"])
    assert "default-src 'none'" in content
    assert "://" not in content.replace("http://www.w3.org/2000/svg", "")  # a name, not a file
    assert list(tmp_path.iterdir()) == [out]


@torch.no_grad()
@pytest.mark.parametrize("settings", [SPARSE, WINDOWS, dict(SPARSE, importance="logits"), None])
def test_model_reads_what_the_drop_in_reads(settings, folder):
    """Its outputs are the same, and others than those of dense attention."""
    path = folder / ("drop-in" if settings is None else "dense")
    model, tokenizer = load_viewed(path, settings, torch.device("cpu"))
    assert {p.dtype for p in model.parameters()} == {torch.float32} and not model.training
    ids = torch.tensor([tokenizer(TEXT)["input_ids"]])
    original = transformers.AutoModelForCausalLM.from_pretrained(path).eval()
    expected = hf.use_sparse_attention(original, **(settings or {}))(ids).logits
    dense = hf.use_dense_attention(original)(ids).logits
    found = model(ids, use_cache=False).logits
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
    assert (found - dense).abs().max() > 0.01


@pytest.mark.parametrize(
    ("name", "args", "message"),
    [
        ("nowhere", (), "MODEL must be a folder of a model of transformers with"),
        ("nowhere.gguf", (), "or .gguf file, got"),
        ("other", (), "other. Should have a `model_type` key in its config.json"),
        ("unknown", (), "model type `bees` but Transformers does not recognize"),
        ("encoder", (), "must hold a decoder, got model_type='t5'"),
        ("without", (), "must hold a tokenizer"),
        ("refused", (), "model must have attention of GemmaAttention"),
        ("torn", (), "torn cannot be loaded: "),
        ("wide", (), "got none of the size of model.layers.0.mlp."),
        ("empty", (), "no file named model.safetensors"),
        ("broken.gguf", (), "broken.gguf"),
        ("dense", ("--settings", '{"bees": 1}'), "unexpected keyword argument 'bees'"),
        ("dense", ("--settings", '{"dense_length": -1}'), "dense_length must be"),
        ("dense", ("--settings", "bees"), "argument --settings: invalid json_object value"),
        ("native", ("--settings", "{}"), "settings must be None for a model of type 'nsa'"),
    ],
)
def test_bad_input_is_told_in_one_line(name, args, message, folder, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert call(folder, name, *args) == 2
    assert message in told_error(capsys) and not list(tmp_path.iterdir())


def write_gguf(path, model, tokenizer):
    """A Qwen2 without windows in the format of GGUF, with tokens of bytes and their merges."""
    gguf = pytest.importorskip("gguf")
    pytest.importorskip("accelerate")
    config, writer = model.config, gguf.GGUFWriter(str(path), "qwen2")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    table = json.loads(tokenizer.backend_tokenizer.to_str())["model"]
    tokens = sorted(table["vocab"], key=table["vocab"].get)
    tokens += [f"<{number}>" for number in range(len(tokens), config.vocab_size)]
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_merges([" ".join(pair) for pair in table["merges"]])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN2, config.num_hidden_layers)
    for name, weight in model.state_dict().items():
        writer.add_tensor(names.get_name(name, (".weight", ".bias")), weight.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@torch.no_grad()
def test_gguf_file(folder, tmp_path, capsys):
    heads = dict(hidden_size=32, num_attention_heads=4, head_dim=8, use_sliding_window=False)
    model = tiny("Qwen2", vocab_size=VOCAB, sliding_window=None, layer_types=None, **heads)
    path, out = tmp_path / "bees.gguf", tmp_path / "page.html"
    write_gguf(path, model, byte_level())
    assert call(folder, path, "--settings", json.dumps(SPARSE), "--out", out) == 0
    data = content_of(out.read_text())
    assert shown(data["texts"]) == TEXT
    hf.convert(model, importance="head_max", **SPARSE)
    ids = byte_level()(TEXT, add_special_tokens=False)["input_ids"]
    expected = content_of(page(model, ids, data["texts"], model_kwargs=dict(use_cache=False)))
    assert [one["blocks"] for one in data["layers"]] == [
        one["blocks"] for one in expected["layers"]
    ]


def test_without_transformers(folder, capsys, monkeypatch):
    for module in [m for m in sys.modules if m.startswith("native_sparse_attention.hf")]:
        monkeypatch.delitem(sys.modules, module)
    version = metadata.version
    monkeypatch.setattr(metadata, "version", lambda n: version(n if n != "transformers" else "no"))
    assert call(folder, "dense") == 2
    assert "pip install -e '.[hf]'" in told_error(capsys)


def test_texts_of_tokens():
    tokenizer = byte_level()
    ids, texts = token_texts(tokenizer, "é🐝</s>\x07 the")
    assert ids == tokenizer("é🐝</s>\x07 the")["input_ids"]
    assert texts[:10] == ["<s>", "·", "é", "·", "·", "·", "🐝", "</s>", "␇", " the"]
    assert token_texts(words(), "the\n  bees ants ") == ([2, 1, 0], ["the", " bees", " [UNK]"])
