"""What the tests of Composer's callback are given; those of other frameworks have fixtures of their own."""

from collections.abc import Callable
from typing import Any

import pytest
import torch


@pytest.fixture(name="saving")
def _saving(request: pytest.FixtureRequest) -> Callable[..., Any]:
    """Makes Composer's callbacks that save to one run in memory, of this test's own."""
    from support.composer_callbacks import saving_to  # Composer, which other frameworks' tests do without

    torch.set_num_threads(1)
    return saving_to(f"memory://composer/{request.node.name}".replace("[", "-").replace("]", ""))
