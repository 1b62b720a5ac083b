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


LONG = ("tests/launcher/", "tests/parallel/", "tests/checkpoints/")


def place(path: str) -> int:
    """Of a file's folder in the order of a run."""
    return next((number for number, folder in enumerate(LONG) if folder in path), len(LONG))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Long files first; what needs a GPU is skipped, with the reason, where there is none."""
    items.sort(key=lambda item: place(item.path.as_posix()))
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA GPU; torch.cuda.is_available() is False here")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)
