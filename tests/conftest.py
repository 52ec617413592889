"""Fixtures for all tests. Without a GPU, Triton kernels run in Triton's interpreter. It must be
turned on before the first kernel is defined, so this module does it at import."""

import gc
import os
import sys

import hypothesis
import pytest
import torch

from tests.slow import WHOLE

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
    torch.set_num_threads(1)

    from tests import fork_server
    from tests.interpreter import reuse_what_stays

    reuse_what_stays()
    if sys.platform == "linux":
        fork_server.use()


def pytest_configure(config: pytest.Config) -> None:
    """Configures Hypothesis, and tells tests whether the slow ones run.

    Hypothesis draws new examples only when slow tests run; otherwise all machines try the same
    ones. Examples have no deadline, because a busy machine would miss it.
    """
    hypothesis.settings.register_profile("all", deadline=None)
    hypothesis.settings.register_profile("same", deadline=None, derandomize=True, database=None)
    if "not slow" not in config.option.markexpr:
        os.environ[WHOLE] = "1"
        hypothesis.settings.load_profile("all")
    else:
        hypothesis.settings.load_profile("same")


def pytest_collection_finish() -> None:
    """Excludes objects made during imports from later garbage collections."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    gc.unfreeze()


@pytest.fixture
def kernel_device() -> str:
    """Returns the device of Triton kernels: a GPU, else CPU tensors for the interpreter."""
    return "cuda" if torch.cuda.is_available() else "cpu"
