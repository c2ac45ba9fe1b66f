"""Where a run and its log are."""

from uuid import uuid4

import pytest


@pytest.fixture
def places() -> tuple[str, str]:
    name = uuid4().hex
    return f"memory://{name}/run", f"memory://{name}/log"
