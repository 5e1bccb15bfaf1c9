"""Every test runs without network, alone on its cores, and away from the user's caches."""

from __future__ import annotations

import atexit
import gc
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

# Before any library reads them. Worker processes started by tests inherit them too.
os.environ.update(
    {
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        # What DeepSpeed compiles, for more than a minute, names the paths of one environment: checkouts that
        # take turns in the user's folder would compile it each time.
        "TORCH_EXTENSIONS_DIR": os.environ.get("TORCH_EXTENSIONS_DIR", f"{sys.prefix}/torch_extensions"),
        # DeepSpeed looks its build tool, ninja, up on PATH.
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}",
        "PYTHONPATH": f"{Path(__file__).parents[1] / 'src'}{os.pathsep}{os.environ.get('PYTHONPATH', '')}",
    }
)

gc.disable()  # until all is imported: a million objects that last
if "PYTEST_XDIST_WORKER" in os.environ:  # to take them apart takes seconds
    atexit.register(os._exit, 0)


def pytest_collection_finish() -> None:
    """From here on Python looks for garbage, but among what is new and a tenth as often."""
    gc.freeze()
    gc.set_threshold(10_000, 10, 10)
    gc.enable()


def pytest_unconfigure() -> None:
    """Else Triton would call what was not searched lost."""
    gc.unfreeze()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests marked `gpu` are skipped, and said to be, where there is none."""
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    import torch

    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU"))


@pytest.fixture(autouse=True, scope="session")
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Tokenised data goes to a folder of this test session."""
    os.environ["SHARDWISE_CACHE"] = str(tmp_path_factory.mktemp("cache"))


@pytest.fixture(autouse=True, scope="module")
def _search_only_what_is_new() -> Iterator[None]:
    """What torch, transformers and earlier tests have left is not searched for garbage again and again.

    transformers and the code under test ask for such searches; among a million objects each takes a second.
    """
    yield
    gc.collect()
    gc.freeze()
