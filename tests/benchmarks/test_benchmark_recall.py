"""Associative recall and the needle: the task is what it says."""

from argparse import Namespace

import numpy as np
import pytest
import torch

from benchmarks import learning, recall


def test_sequences():
    """A question's key has come once, with the value that follows; far enough, noise elsewhere."""
    task = recall.Task(pairs=5, noise=10, keys=8, values=6, least_distance=16)
    ids, asked, distance = task.draw(50, 128, np.random.default_rng(0))
    again = task.draw(50, 128, np.random.default_rng(0))
    assert all(torch.equal(a, b) for a, b in zip((ids, asked, distance), again))
    assert ids.shape == (50, 128) and asked.shape == distance.shape == (50, 5)
    assert 16 <= distance.min() < 24 and 100 < distance.max() < 128
    told = asked - distance
    assert told.min() == 0 and told.max() < 64 - 16 and asked.min() == 64 and asked.max() == 126
    for row in range(50):
        keys, values = ids[row][asked[row]], ids[row][asked[row] + 1]
        assert keys.unique().numel() == 5 and set(keys.tolist()) <= set(range(10, 18))
        assert set(values.tolist()) <= set(range(18, 24)) and task.tokens == 24
        assert torch.equal(ids[row][told[row]], keys)
        assert torch.equal(ids[row][told[row] + 1], values)
        assert (ids[row] < 10).sum() == 128 - 20
    with pytest.raises(ValueError, match="T must be a multiple of 4 from 52 on, got 48"):
        task.draw(1, 48, np.random.default_rng(0))


class Perfect(torch.nn.Module):
    """The value of the last equal token."""

    def forward(self, ids):
        same = ids[:, :, None] == ids[:, None]
        past = torch.ones(ids.shape[1], ids.shape[1]).tril(-1).bool()
        last = (same & past) * torch.arange(1, ids.shape[1] + 1)
        at = last.max(-1).values.clamp(max=ids.shape[1] - 1)
        return torch.nn.functional.one_hot(ids.gather(1, at), 256).float() * 100


def test_accuracy():
    task = recall.QUICK_TASK
    cfg = Namespace(device="cpu", precision="fp32", batch_size=2, seq_len=96)
    assert recall.evaluate(Perfect(), task, 192, 4 * 192, cfg) == 1
    blind = torch.nn.Sequential(torch.nn.Embedding(task.tokens, task.tokens))
    assert recall.evaluate(blind, task, 192, 4 * 192, cfg) < 1


def test_settings_of_every_variant():
    """They make models, and questions are beyond windows and local blocks."""
    found, sizes = recall.variants(), recall.LARGE
    plan = recall.plan_of(found, sizes, (0, 1, 2), recall.LR)
    assert len(plan([])) == len(found) * len(recall.LR)
    for settings in found.values():
        local = settings["num_local_blocks"] * settings["selection_block_size"]
        assert max(local, settings["sliding_window_size"]) < sizes.task.least_distance
    assert found["published"]["compress_block_size"] == 8
    assert found["one softmax, max of 4, rotated"]["compress_block_size"] == 4
    assert len(set(map(str, found.values()))) == len(found)
    assert min(sizes.lengths + sizes.train_lengths) >= sizes.task.least_length


# the needle


class Copies(torch.nn.Module):
    """Reads the number of the comment that the text ends with; `shift` finds another one."""

    def __init__(self, shift=0):
        super().__init__()
        self.shift = shift

    def forward(self, ids):
        logits = torch.zeros(*ids.shape, 256)
        for row, out in zip(ids, logits):
            text = bytes(row.tolist())
            question = text.rindex(b"/* The number of")
            before = text[question : text.index(b" is ", question) + 4]
            at = text.index(before) + len(before)
            answers = row[at : at + learning.DIGITS] + self.shift
            out[-learning.DIGITS :].scatter_(1, answers[:, None], 100.0)
        return logits


def test_needle():
    text = np.frombuffer(b"int x = 0;\n" * 100, dtype=np.uint8)
    cfg = Namespace(device="cpu", precision="fp32", batch_size=2, seq_len=400)
    right = {"digits": 1.0, "numbers": 1.0, "bits": 0.0}
    assert learning.digits_found(Copies(), text, 3, cfg) == dict.fromkeys(
        ("0.1", "0.5", "0.9"), right
    )
    wrong = learning.digits_found(Copies(1), text, 3, cfg)
    assert all(found["digits"] == found["numbers"] == 0 < found["bits"] for found in wrong.values())
    for depth in learning.DEPTHS:
        row = learning.context(text, 400, depth, np.random.default_rng(0))
        at = bytes(row.tolist()).index(b"/* The number")
        assert len(row) == 400 and abs(at - depth * 320) < 40
    with pytest.raises(ValueError, match="T must be from 136 to the bytes of text=1100, got 100"):
        learning.digits_found(Copies(), text, 3, Namespace(seq_len=100))
