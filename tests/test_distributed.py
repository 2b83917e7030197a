"""Real processes under torchrun, on the CPU over gloo: sharded models are the models themselves."""

import re
from pathlib import Path

from tests.helpers import processes
from tests.helpers.processes import printed

SCRIPTS = Path(__file__).parent / "scripts"
PAGE = Path(__file__).parent.parent / "docs" / "scaling.md"


def torchrun(script: str | Path, number: int, *arguments: str, restarts: int = 0) -> str:
    """What so many processes print."""
    # docs/scaling.md: what a restart needs; no GPU, of which there may be fewer than processes
    how = dict(TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1", CUDA_VISIBLE_DEVICES="", restarts=restarts)
    return printed(processes.torchrun(number, SCRIPTS / script, *arguments, **how))


def test_two_processes(tmp_path):
    """Data, tensor and context parallel alone, DDP and FSDP, layers of a sharded sequence, what is
    refused, a compiled model, and a checkpoint after which a rank was killed in a save. Models of
    transformers: drop-in, converted and native ones."""
    torchrun("parallel_worker.py", 2, str(tmp_path), restarts=1)


def test_products_of_parallelisms():
    torchrun("parallel_worker.py", 4)


def test_script_of_the_documentation(tmp_path):
    blocks = re.findall(r"^```py\n(.*?)^```$", PAGE.read_text("utf-8"), re.DOTALL | re.MULTILINE)
    training, _, resuming, decoding = blocks
    end = "dist.destroy_process_group()\n"
    assert training.endswith(end)
    script = tmp_path / "train.py"
    # see parallel_worker.py
    source = training.removesuffix(end) + resuming + decoding + end + "os._exit(0)\n"
    script.write_text(source.replace('"checkpoint"', repr(str(tmp_path / "checkpoint"))), "utf-8")
    losses = re.findall(r"^\d (\d+\.\d+)$", torchrun(script, 2), re.MULTILINE)
    assert len(losses) == 3 and all(5 < float(loss) < 7 for loss in losses)
