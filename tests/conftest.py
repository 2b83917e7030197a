"""Fixtures: seeding, the GPU marker, and the published packages to compare with."""

import contextlib
import importlib
import importlib.metadata
import importlib.util
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

PUBLISHED = Path(__file__).parent / ".published"
DISTRIBUTION = "native-sparse-attention-pytorch"
PACKAGE = "native_sparse_attention_pytorch"
SUBMODULES = ("native_sparse_attention", "compress_networks", "transformer")
# modules whose tests start several processes, or wait for one that compiles
LAUNCHING = ("test_benchmark_distributed", "test_distributed", "test_ranks", "test_without_gpu")


# what needs the extra hf, and what needs triton
collect_ignore = [] if importlib.util.find_spec("transformers") else ["hf"]
if not importlib.util.find_spec("triton"):
    collect_ignore += ["kernels", "ops/triton", "test_rotary.py"]

# tensors here are tiny: threads would wait for one another longer than they compute
torch.set_num_threads(1)
# without a GPU the kernels run in Triton's interpreter, which asks for it before triton is imported
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")


# of Triton's interpreter, on numpy
INTERPRETER_WARNINGS = (
    "ignore:divide by zero:RuntimeWarning",
    "ignore:invalid value:RuntimeWarning",
    "ignore:Conversion of an array with ndim:DeprecationWarning",
)


def pytest_xdist_auto_num_workers() -> int:
    """Processes for `-n auto`, of the cores that there are for this one: each takes a GPU's memory
    for itself, or 1 to 2 GB of the CPU's."""
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    else:
        cores = os.cpu_count() or 1
    return min(cores, 4 if torch.cuda.is_available() else 8)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all", action="store_true", help="every case of slow tests, as on a GPU")


def leave_slow(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Of a test marked slow keep one of every `one_of` cases, drawn by its name; none without."""
    groups: dict[tuple[Path, str], list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("slow"):
            groups.setdefault((item.path, getattr(item, "originalname", "")), []).append(item)
    left: set[pytest.Item] = set()
    for (_, name), cases in groups.items():
        one_of = cases[0].get_closest_marker("slow").kwargs.get("one_of")
        kept = 0 if one_of is None else -(-len(cases) // one_of)
        left.update(random.Random(name).sample(cases, len(cases) - kept))
    if left:
        config.hook.pytest_deselected(items=[item for item in items if item in left])
        items[:] = [item for item in items if item not in left]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    # those that start processes, first: one at the end would leave a core idle
    items.sort(key=lambda item: item.path.stem not in LAUNCHING)
    asked = config.option.all or config.option.keyword or any("::" in arg for arg in config.args)
    if not asked and not torch.cuda.is_available():
        leave_slow(config, items)
    for item in items:
        if item.get_closest_marker("kernels"):
            item.fixturenames.insert(0, "runnable")  # a marker comes too late for it
            for warning in INTERPRETER_WARNINGS:
                item.add_marker(pytest.mark.filterwarnings(warning))
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(skip)


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown() -> None:
    """Give back memory that a test no longer uses: several processes share the GPU."""
    if torch.cuda.is_available() and torch.cuda.memory_reserved() > 2**28:
        torch.cuda.empty_cache()


@pytest.fixture
def as_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """Host code runs once a call, for who counts what it does: nothing is compiled precompile."""
    precompile = pytest.importorskip("native_sparse_attention.kernels.common.precompile")
    monkeypatch.setattr(precompile, "is_possible", lambda: False)


@pytest.fixture
def forget_plans() -> Iterator[Callable[[], None]]:
    """Plans are cached by shape: a test that changes limits plans anew, and leaves no plan."""

    def forget() -> None:
        for name, module in list(sys.modules.items()):
            if name.startswith("native_sparse_attention.kernels"):
                for value in vars(module).values():
                    getattr(value, "cache_clear", lambda: None)()

    forget()
    yield forget
    forget()


@pytest.fixture(autouse=True)
def seed() -> Iterator[None]:
    """The same numbers in each test, and the precision that torch begins with: training scripts
    that run in this process choose another."""
    # without a GPU torch.manual_seed only notes down a traceback for each kind that there may be
    (torch.manual_seed if torch.cuda.is_available() else torch.default_generator.manual_seed)(0)
    precision = torch.get_float32_matmul_precision()
    yield
    torch.set_float32_matmul_precision(precision)


@pytest.fixture(scope="session")
def runnable() -> None:
    """Some releases of Triton's interpreter cannot run under some releases of numpy."""
    pytest.importorskip("triton")
    from native_sparse_attention import select_blocks
    from tests.helpers import interpreter

    if torch.cuda.is_available():
        return
    interpreter.hasten()
    q, geometry = torch.randn(1, 9, 1, 16), dict.fromkeys(("seq_len", "num_selected_blocks"), 9)
    for name in ("compress_block_size", "compress_block_sliding_stride", "selection_block_size"):
        geometry[name] = 1
    try:
        select_blocks(q, q, backend="triton", **geometry)
    except Exception as error:
        if "0-dimensional arrays" not in str(error):
            raise
        pytest.skip(f"Triton's interpreter and this numpy do not go together: {error}")


@pytest.fixture
def untraced_flex(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the CPU flex_attention traces its mask anew for most shapes, at a third of a second each;
    here it runs the same mathematics without. Torch versions without this switch just take longer.
    """
    name = "torch.nn.attention.flex_attention._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG"
    monkeypatch.setattr(name, True, raising=False)


@pytest.fixture
def flex_gradients(monkeypatch: pytest.MonkeyPatch) -> Callable[..., torch.Tensor]:
    """flex_attention with gradients on the CPU. Torch has the mathematics, in eager PyTorch, and
    refuses the device; here it does not. The graphs of mods, forward and backward, are traced as
    they are for CUDA."""
    from torch.nn.attention import flex_attention as flex

    monkeypatch.setattr(flex, "_validate_device", lambda *tensors: None, raising=False)
    torch._dynamo.reset()
    return torch.compile(flex.flex_attention, backend="aot_eager", fullgraph=True)


def download(version: str) -> Path:
    """Where `version` lies under tests/.published, after one short attempt to put it there."""
    target = PUBLISHED / version
    if target.is_dir():
        return target
    PUBLISHED.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=PUBLISHED, prefix=f"{version}.") as unfinished:
        folder = Path(unfinished, "site")
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps"]
        command += ["--disable-pip-version-check", "--retries", "0", "--timeout", "5"]
        command += ["--target", str(folder), f"{DISTRIBUTION}=={version}"]
        subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
        with contextlib.suppress(OSError):  # another test process was first
            folder.rename(target)
    return target


def load(version: str) -> ModuleType:
    """Both versions go by one name, of which nothing is left in sys.modules."""
    try:
        is_installed = importlib.metadata.version(DISTRIBUTION) == version
    except importlib.metadata.PackageNotFoundError:
        is_installed = False
    with pytest.MonkeyPatch.context() as patch:
        if not is_installed:
            patch.syspath_prepend(str(download(version)))
        for name in ("", *SUBMODULES):
            importlib.import_module(f"{PACKAGE}.{name}".removesuffix("."))
    module = sys.modules[PACKAGE]
    for name in [name for name in sys.modules if name.split(".")[0] == PACKAGE]:
        del sys.modules[name]
    return module


@pytest.fixture(scope="session")
def published() -> Callable[[str], ModuleType]:
    """`published(version)` is the package of that version ('0.2.3' or '0.1.12'), its submodules
    loaded as attributes. The test is skipped where it is neither installed nor downloadable."""
    known: dict[str, ModuleType | str] = {}

    def get(version: str) -> ModuleType:
        if version not in known:
            try:
                known[version] = load(version)
            except subprocess.SubprocessError as error:
                why = getattr(error, "stderr", "") or error
                known[version] = f"{DISTRIBUTION}=={version} is not installed, pip failed: {why}"
        found = known[version]
        if isinstance(found, str):
            pytest.skip(found)
        return found

    return get


@pytest.fixture
def nothing_to_release(monkeypatch: pytest.MonkeyPatch) -> None:
    """Collecting garbage between the rows of a benchmark takes longer here than all else."""
    from benchmarks import common

    monkeypatch.setattr(common, "release", lambda: None)


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The steps that layers took by the kernels."""
    from native_sparse_attention import KVCache

    taken = []

    def decoded(cache: Any, tokens: Any, device: Any) -> Any:
        taken.append(tokens.host)
        return real(cache, tokens, device)

    real = KVCache.decoded
    monkeypatch.setattr(KVCache, "decoded", decoded)
    return taken
