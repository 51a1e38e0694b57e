"""What every test shares: where the demo model is, tests that need a GPU, the cores."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from vllm_tokenswift.common.cache_folder import cache_home
from vllm_tokenswift.common.compiled import CACHE_NAME
from vllm_tokenswift.demo.model import CHECKPOINT_NAME

# Before vLLM is imported by any test: no model hub, no statistics.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")


def _keep_to_own_cores() -> None:
    """Gives each of pytest-xdist's workers a part of the cores, for all that it starts as well.

    An OpenMP thread that waits for the others of its team keeps its core busy: where two engines
    shared cores, each would spend its time waiting for threads that have none. To be called
    before torch is imported, which then takes as many threads as there are cores left.
    """
    worker = os.environ.get("PYTEST_XDIST_WORKER")
    if worker is not None:
        number, count = int(worker.removeprefix("gw")), int(os.environ["PYTEST_XDIST_WORKER_COUNT"])
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[number::count])


_keep_to_own_cores()

ENGINE_TESTS = Path(__file__).parent / "engine"
MOST_WORKERS = 4  # each of them needs up to 5 GB of memory
# Half a minute and more each: no worker shall begin one of these when the others are done.
LONGEST_FILES = (
    "test_modes.py",
    "test_losslessness.py",
    "test_long_generation.py",
    "test_tensor_parallel.py",
    "test_engine_process.py",
    "test_compiled.py",
    "test_cuda_kernels.py",
    "test_train.py",
)


@functools.cache
def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def pytest_xdist_auto_num_workers() -> int:
    """A worker for every core; none where there is one core, or a GPU, which is not shared."""
    cores = len(os.sched_getaffinity(0))
    return 0 if cores == 1 or _has_gpu() else min(cores, MOST_WORKERS)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    order = {name: place for place, name in enumerate(LONGEST_FILES)}
    items.sort(key=lambda item: order.get(item.path.name, len(order)))
    for item in items:
        if ENGINE_TESTS in item.path.parents:
            item.add_marker(pytest.mark.engine)
        if item.get_closest_marker("gpu") and not _has_gpu():
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))


@pytest.fixture(scope="session", autouse=True)
def own_home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Costs measured by tests neither come from the user's home nor go there.

    The demo model and compiled code, which take long to make, are the user's.
    """
    home = tmp_path_factory.mktemp("tokenswift-home")
    for name in (CHECKPOINT_NAME, CACHE_NAME):
        (home / name).symlink_to(cache_home() / name)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TOKENSWIFT_HOME", str(home))
        yield home


@pytest.fixture(scope="session")
def demo_model(own_home: Path) -> Path:
    """The converted demo model; made first where it is missing."""
    from vllm_tokenswift.demo import model as demo_model

    return demo_model.prepare((own_home / CHECKPOINT_NAME).readlink())


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A config without weights: enough for everything up to vLLM's finished configuration."""
    from transformers import LlamaConfig

    path = tmp_path_factory.mktemp("tiny-llama")
    config = LlamaConfig(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=512,
        architectures=["LlamaForCausalLM"],
        dtype="float32",
    )
    config.save_pretrained(path)
    return path
