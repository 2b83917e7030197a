"""Real processes under torchrun, on the CPU over gloo: sharded models are the models themselves."""

import importlib.util
import re
from pathlib import Path
from typing import Any

from tests.helpers import processes
from tests.helpers.processes import printed

PAGE = Path(__file__).parent.parent / "docs" / "scaling.md"
WORKER = Path(__file__).parent / "scripts" / "parallel_worker.py"


def torchrun(number: int, script: Path, *arguments: str, **options: Any) -> str:
    """What so many processes print."""
    # docs/scaling.md: what a restart needs; no GPU, of which there may be fewer than processes
    environment = dict(TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1", CUDA_VISIBLE_DEVICES="")
    return printed(processes.torchrun(number, script, *arguments, **options, **environment))


def test_two_processes(tmp_path):
    """Data, tensor and context parallel alone, DDP and FSDP, layers of a sharded sequence, what is
    refused, a compiled model, and a checkpoint after which a rank was killed in a save. Models of
    transformers: drop-in, converted and native ones."""
    has_transformers = importlib.util.find_spec("transformers")
    name = "pretrained_worker" if has_transformers else "parallel_worker"
    torchrun(2, WORKER, str(tmp_path), restarts=1, imports=[f"tests.scripts.{name}"])


def test_products_of_parallelisms():
    torchrun(4, WORKER, imports=["tests.scripts.parallel_worker"])


def test_script_of_the_documentation(tmp_path):
    blocks = re.findall(r"^```py\n(.*?)^```$", PAGE.read_text("utf-8"), re.DOTALL | re.MULTILINE)
    training, _, resuming, decoding = blocks
    end = "dist.destroy_process_group()\n"
    assert training.endswith(end)
    script = tmp_path / "train.py"
    source = training.removesuffix(end) + resuming + decoding + end
    script.write_text(source.replace('"checkpoint"', repr(str(tmp_path / "checkpoint"))), "utf-8")
    losses = re.findall(r"^\d (\d+\.\d+)$", torchrun(2, script), re.MULTILINE)
    assert len(losses) == 3 and all(5 < float(loss) < 7 for loss in losses)
