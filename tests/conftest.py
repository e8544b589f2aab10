"""Fixtures that many tests share."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, settings

from mono.fast.targets import SUPPORTED, Target

# interpreted kernels take milliseconds, the first call more: no deadline, few examples, always the same
settings.register_profile(
    "mono", deadline=None, max_examples=20, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("mono")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA GPU")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    """The same random numbers whichever tests ran before."""
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002  # for code that uses the global generator
    torch.manual_seed(0)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> torch.device:
    """Each device that the fast arms run on; the CPU interprets."""
    return torch.device(request.param)


@pytest.fixture(params=list(SUPPORTED))
def compile_target(request: pytest.FixtureRequest) -> Target:
    """Each GPU that kernels must compile for."""
    return SUPPORTED[request.param]
