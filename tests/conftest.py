"""Shared fixtures: the pool of gloo processes, and the GPU mark."""

from collections.abc import Iterator

import pytest
import torch

from tests.spawn import Ranks


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    """Up to 8 gloo processes for the whole run."""
    pool = Ranks(8)
    yield pool
    pool.close()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests marked gpu are skipped, with the reason, where there is no GPU."""
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA GPU; torch.cuda.is_available() is False here")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)
