"""docs/options.md is what docs/options.py makes of the docstrings."""

import importlib.util
from pathlib import Path

DOCS = Path(__file__).resolve().parents[1] / "docs"


def test_the_page_is_that_of_the_code() -> None:
    spec = importlib.util.spec_from_file_location("options_page", DOCS / "options.py")
    assert spec is not None
    assert spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    assert made.page() == (DOCS / "options.md").read_text(encoding="utf-8"), "run python docs/options.py"
