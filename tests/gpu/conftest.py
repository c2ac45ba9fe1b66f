"""Everything in this folder needs a GPU, and is skipped without one: ``pytest tests/gpu``."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from gpu.device import WANTED

_HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark this folder's tests, and skip them where there is no GPU."""
    for item in items:
        if _HERE in item.path.parents:
            item.add_marker(pytest.mark.gpu)
            if not WANTED:
                item.add_marker(pytest.mark.skip(reason="needs a GPU"))


@pytest.fixture(autouse=True)
def _repeatable() -> Iterator[None]:
    """Two runs of one training are the same only where the GPU's kernels repeat themselves."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)
