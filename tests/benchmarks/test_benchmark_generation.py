"""The benchmark of `generate` of transformers: what is wrong is refused."""

import pytest
import torch

pytest.importorskip("transformers", reason="needs the extra hf")

from benchmarks import common, generation
from benchmarks.generation import Form
from benchmarks.oracle import WrongResult
from native_sparse_attention.hf import attention

pytestmark = pytest.mark.usefixtures("nothing_to_release")

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def network():
    return generation.network_of("tiny", None, CPU, torch.float32)


def test_wrong_attention_is_not_timed(monkeypatch, network):
    """A step of decoding that misses one value; a forward that loses a little."""
    small = generation.checked_network(network)
    form = generation.forms_of((16,), 32, 32)[1]
    assert generation.check(form, small) < 1e-4
    forms = {form.name: form for form in generation.forms_of((16,), 32, 32)}
    assert generation.check(forms["converted, 16"], small) < 1e-4
    assert generation.check(forms["means of 16"], small) < 1e-4
    right = attention.branches.attend

    def one_value_less(call, *rest):
        if call.q.shape[1] == 1:
            call = call.but(v=call.v.index_fill(1, torch.tensor([1]), 0))
        return right(call, *rest)

    def scaled(call, *rest):
        out, block_indices = right(call, *rest)
        return 0.9 * out, block_indices

    for wrong in (one_value_less, scaled):
        monkeypatch.setattr(attention.branches, "attend", wrong)
        with pytest.raises(WrongResult, match="logits with all blocks are .* off SDPA's"):
            generation.check(form, small)
    plan = generation.Plan("tiny", (Form("sdpa"), form), (8,), (1,), deadline=0.0)
    recorder = common.Recorder(None, CPU, ("form",))
    generation.measure_all(network, plan, recorder)
    (row,) = recorder.rows
    assert row["form"] == "max of 16" and row["failed"].startswith("wrong: logits")
