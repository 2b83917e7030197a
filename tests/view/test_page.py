"""The page holds the layers' own numbers, and shows them in a browser where there is one."""

import base64
import html
import json
import re
import shutil
import subprocess

import numpy as np
import pytest
import torch

from native_sparse_attention import Transformer, collect
from native_sparse_attention.view import byte_texts, page
from tests.helpers.sizes import sizes

BROWSERS = "chromium", "chromium-browser", "google-chrome", "google-chrome-stable"
BROWSER = next(filter(None, map(shutil.which, BROWSERS)), None)

TEXT = "Bees read the dance of bees.\n\tA dance is a map: \u00e9t\u00e9 </script> & <b>\n" * 3
DATA = TEXT.encode() + b"\xff\x00\x07"
TOKENS = list(DATA)
SMALL = sizes(4, 2, 8, n=2, w=4, num_initial_blocks=1)
ONE_SOFTMAX = SMALL | dict(branches=("selected",), dense_length=16, num_local_blocks=2)
FORMS = {
    "three branches": SMALL,
    "own rankings": SMALL | dict(query_heads_share_selected_kv=False, importance="probs"),
    "one softmax": ONE_SOFTMAX,
    "window alone": SMALL | dict(branches=("window",)),
}


def model(name="three branches", **kwargs):
    torch.manual_seed(0)
    return Transformer(
        256, 16, depth=2, dim_head=4, heads=4, kv_heads=2, use_sparse_attn=True,
        sparse_attn_kwargs=FORMS[name], **kwargs,
    )  # fmt: skip


def content_of(text):
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)
    return json.loads(found[1])


def array(encoded, dtype, *shape):
    return np.frombuffer(base64.b64decode(encoded), dtype).reshape(shape)


def recorded(module):
    with torch.no_grad(), collect(module, None) as seen:
        module(torch.tensor([TOKENS]))
    return seen


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("causal", [True, False])
def test_data_is_what_the_layers_read(name, causal):
    module = model(name, causal=causal)
    data, seen = content_of(page(module, TOKENS, byte_texts(DATA))), recorded(module)
    m = len(TOKENS)
    assert data["positions"] == list(range(m)) and data["texts"] == byte_texts(DATA)
    assert [layer["name"] for layer in data["layers"]] == list(seen)
    for layer, reading in zip(data["layers"], seen.forward()):
        assert layer["causal"] == causal and layer["kinds"] == list(reading.kinds)
        dense = array(layer["dense"], np.uint8, m)
        assert (dense == reading.dense[0].numpy()).all()
        shares = [("caught", reading.mass, 2), ("window_mass", reading.window_mass, 2),
                  ("mass", reading.block_mass, 2), ("gates", reading.gates, 1),
                  ("agreement", reading.agreement, 1)]  # fmt: skip
        for key, values, power in shares:
            if values is None:
                assert layer[key] is None
                continue
            values = values[0].nan_to_num().numpy()
            found = (array(layer[key], np.uint8, *values.shape) / 255) ** power
            assert abs(found - values).max() < 0.0045
        if reading.blocks is None:
            assert layer["blocks"] is None and layer["ranks"] == 0
            continue
        expected = reading.blocks[0].numpy().astype(np.int64)
        blocks = array(layer["blocks"], "<u2", *expected.shape).astype(np.int64)
        assert (np.where(blocks == data["empty"], -1, blocks) == expected).all()


def test_page_is_one_file_that_asks_for_nothing():
    text = page(model(), TOKENS, byte_texts(DATA), title="<i>bees</i> & co {{data}} \udc80")
    assert text.count("{{") == 2 and text.count("</script>") == 2
    assert "<title>&lt;i&gt;bees&lt;/i&gt; &amp; co {{data}} ?</title>" in text
    assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)|<link|@import|url\(|src=", text)
    assert "default-src 'none'" in text and text.encode()


def test_four_thousand_tokens_take_less_than_five_megabytes():
    """With the heads, blocks and layers of train_enwik8.py's CUDA preset."""
    torch.manual_seed(0)
    sparse = sizes(16, 8, 16, n=4, w=64)
    module = Transformer(256, 16, depth=1, dim_head=4, heads=8, kv_heads=4, use_sparse_attn=True,
                         sparse_attn_kwargs=sparse)  # fmt: skip
    data = (DATA * 50)[:1024]
    tokens, texts = list(data), byte_texts(data)
    fixed = len(page(module, tokens[:1], texts[:1]))
    of_a_layer = len(page(module, tokens, texts)) - fixed
    assert fixed + 6 * 4 * of_a_layer < 5e6


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ((TOKENS, ["a"]), f"texts must be {len(TOKENS)} strings, one a token"),
        (([1, 2], ["a", 3]), "texts must be 2 strings, one a token"),
        (([], []), r"tokens must be ids \[n\]"),
        (([0.5], ["a"]), r"tokens must be ids \[n\]"),
        (("bees", ["a"]), r"tokens must be ids \[n\] of one text, got 'bees'"),
        (([1], None), "texts must be 1 strings, one a token, got None"),
        (([1], ["a"], dict(title=None)), "title must be a string, got None"),
        (([1], ["a"], dict(model_kwargs="x")), "model_kwargs must be a dict or None, got 'x'"),
    ],
)
def test_bad_arguments(args, message):
    tokens, texts, *options = args
    with pytest.raises(ValueError, match=message):
        page(model(), tokens, texts, **dict(*options))


def test_some_tokens_of_some_layers():
    """The same of ids and of names; modes of the model and gradients stay."""
    module, texts = model().train(), byte_texts(DATA)
    module.layers[0].eval()
    modes = [part.training for part in module.modules()]
    data = content_of(page(module, TOKENS, texts, queries=5, layers=["layers.1.0"], seed=3))
    again = content_of(page(module, torch.tensor(TOKENS), texts, queries=5, layers=[1], seed=3))
    assert data == again and len(data["positions"]) == 5 and len(data["layers"]) == 1
    assert modes == [part.training for part in module.modules()]
    assert all(parameter.grad is None for parameter in module.parameters())


SCRIPT = """
<script>
const told = { errors: [], steps: [] };
addEventListener("error", (event) => told.errors.push(event.message));
function seenMarks() {
  const marks = {};
  for (const kind of ["initial", "ranked", "local", "dense", "window", "now"]) {
    marks[kind] = [...text.querySelectorAll("." + kind)].map((span) => +span.id.slice(1));
  }
  return { marks, details: details.innerText, live: live.textContent, hash: location.hash,
    active: text.getAttribute("aria-activedescendant"),
    selected: [...text.querySelectorAll("[aria-selected=true]")].map((span) => span.id) };
}
function choose(select, value) {
  select.value = value;
  select.dispatchEvent(new Event("change"));
}
const point = (i) => spans[i].dispatchEvent(new MouseEvent("mouseover", { bubbles: true }));
const press = (key) => text.dispatchEvent(new KeyboardEvent("keydown", { key, bubbles: true }));
for (const [action, ...values] of ACTIONS) {
  ({ point, press, click: (i) => spans[i].click(), layer: (v) => choose(layerChoice, v),
     head: (v) => choose(headChoice, v) })[action](...values);
  told.steps.push(seenMarks());
}
told.requests = performance.getEntriesByType("resource").map((entry) => entry.name);
const out = document.createElement("pre");
out.id = "told";
out.textContent = JSON.stringify(told);
document.body.append(out);
</script>
"""


def in_browser(text, actions, folder):
    """What the page shows after each action."""
    path = folder / "page.html"
    script = SCRIPT.replace("ACTIONS", json.dumps(actions))
    path.write_text(text.replace("</body>", script + "</body>"), encoding="utf-8")
    options = ["--headless=new", "--no-sandbox", "--disable-gpu", f"--user-data-dir={folder}/user"]
    done = subprocess.run(
        [BROWSER, *options, "--window-size=1200,800", "--dump-dom", path.as_uri()],
        capture_output=True, timeout=60,
    )  # fmt: skip
    found = re.search(r'<pre id="told">(.*?)</pre>', done.stdout.decode(), re.DOTALL)
    assert found, done.stderr.decode()[-2000:]
    told = json.loads(html.unescape(found[1]))
    assert told["errors"] == told["requests"] == []
    return told["steps"]


def marks(reading, i, head):
    """Tokens by mark, by the reading."""
    out = {name: [] for name in ("initial", "ranked", "local", "dense", "window", "now")}
    s, n, causal = reading.config.selection_block_size, reading.length, reading.config.causal
    last = i + 1 if causal else n
    if reading.dense[0, i]:
        out["dense"] = list(range(last))
    elif reading.blocks is not None:
        rank = head * reading.blocks.shape[2] // reading.config.heads
        for kind, c in zip(reading.kinds, reading.blocks[0, i, rank].tolist()):
            if c >= 0:
                out[kind] += range(c * s, min(c * s + s, last))
    if "window" in reading.config.branches:
        w = reading.config.sliding_window_size
        out["window"] = list(range(max(0, i - w), min(i + 1 if causal else i + w + 1, n)))
    return {name: sorted(tokens) for name, tokens in out.items()} | {"now": [i]}


needs_browser = pytest.mark.skipif(BROWSER is None, reason="needs Chromium")


@needs_browser
@pytest.mark.parametrize("name", ["own rankings", "one softmax"])
def test_browser_marks_what_a_token_reads(name, tmp_path):
    module = model(name)
    seen = recorded(module)
    actions = [
        ("point", 150), ("head", 3), ("layer", 1), ("point", 9), ("click", 100), ("point", 50),
        ("press", "ArrowRight"), ("press", "Home"), ("press", "End"), ("press", "ArrowLeft"),
        ("press", "ArrowUp"), ("press", "Escape"), ("point", 60),
    ]  # fmt: skip
    at = [150, 150, 150, 9, 100, 100, 101, 0, len(TOKENS) - 1, len(TOKENS) - 2, None, None, 60]
    steps = in_browser(page(module, TOKENS, byte_texts(DATA)), actions, tmp_path)
    readings = seen.forward()
    for number, (step, i) in enumerate(zip(steps, at)):
        (now,) = step["marks"]["now"]
        assert i in (now, None)
        reading, head = readings[number > 1], 0 if number == 0 else 3
        assert step["marks"] == marks(reading, now, head)
        assert step["selected"] == [f"t{now}"] == [step["active"]]
        assert step["live"].startswith(f"Token {now}, ")
    assert 0 < steps[10]["marks"]["now"][0] < len(TOKENS) - 10  # a line up
    assert steps[4]["hash"] == "#layer=1&head=3&token=100" and "kept" in steps[4]["details"]
    assert steps[-1]["hash"] == "#layer=1&head=3"
    mass = readings[1].mass[0, 100, 3].item()
    if not readings[1].dense[0, 100]:
        told = re.search(r"(\d+) % of full", steps[4]["live"])[1]
        assert float(told) == pytest.approx(100 * mass, abs=1)
    assert ("Gates" in steps[0]["details"]) == (name != "one softmax")


@needs_browser
def test_browser_passes_over_tokens_not_recorded(tmp_path):
    module = model("window alone", causal=False)
    at = torch.tensor([3, 40, 90])
    text = page(module, TOKENS, byte_texts(DATA), queries=at)
    actions = [("press", "Home"), ("press", "ArrowRight"), ("point", 10), ("press", "End")]
    steps = in_browser(text, actions, tmp_path)
    assert [step["marks"]["now"] for step in steps] == [[3], [40], [40], [90]]
    reading = recorded(module).forward()[0]
    assert steps[0]["marks"] == marks(reading, 3, 0)
    assert "no selected branch" in steps[0]["details"]
