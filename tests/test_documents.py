"""What `make docs` does not see: the documents of the repository's root."""

import re
from pathlib import Path
from unittest.mock import MagicMock, create_autospec

import pytest

ROOT = Path(__file__).parents[1]
LINK = re.compile(r"\]\(([^)\s#]+)(?:#[^)]*)?\)")
NAMED_TEST = re.compile(r"([\w/]*\btest_\w+\.py)(?:::(\w+))?")


def test_the_readme_is_for_a_user_in_a_hurry() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").split()) <= 900


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md", "CHANGELOG.md"])
def test_links_lead_to_files(name: str) -> None:
    links = [link for link in LINK.findall((ROOT / name).read_text(encoding="utf-8")) if "://" not in link]
    assert not [link for link in links if not (ROOT / link).exists()]


def test_every_page_is_in_the_index_by_question() -> None:
    index = set(LINK.findall((ROOT / "docs" / "index.md").read_text(encoding="utf-8")))
    assert {page.name for page in (ROOT / "docs").glob("*.md")} - {"index.md"} <= index


@pytest.mark.parametrize(
    "name",
    [
        "Makefile",
        "CONTRIBUTING.md",
        "tests/campaigns/README.md",
        "tests/core/store/README.md",
        *sorted(page.relative_to(ROOT).as_posix() for page in (ROOT / "docs").rglob("*.md")),
    ],
)
def test_test_files_and_tests_that_are_named_exist(name: str) -> None:
    files = {path.as_posix(): path for path in (ROOT / "tests").rglob("test_*.py")}
    for path, test in NAMED_TEST.findall((ROOT / name).read_text(encoding="utf-8")):
        found = [file for posix, file in files.items() if posix.endswith(f"/{path}")]
        assert found, f"{name} names {path}, which is no file"
        assert not test or any(f"def {test}(" in file.read_text(encoding="utf-8") for file in found), (
            f"{name} names {path}::{test}, which is no test"
        )


def test_the_lines_that_push_to_the_hub_are_calls_of_its_library(monkeypatch: pytest.MonkeyPatch) -> None:
    hub = pytest.importorskip("huggingface_hub")
    page = (ROOT / "docs" / "huggingface.md").read_text(encoding="utf-8")
    [lines] = re.findall(r"```python\n(import huggingface_hub\n.*?)```", page, re.DOTALL)
    calls = {
        name: create_autospec(getattr(hub, name)) for name in re.findall(r"huggingface_hub\.(\w+)\(", lines)
    }
    for name, call in calls.items():
        monkeypatch.setattr(hub, name, call)
    exec(lines, {"trainer": MagicMock()})
    assert {name: call.call_count for name, call in calls.items()} == {"create_repo": 1, "upload_folder": 1}
