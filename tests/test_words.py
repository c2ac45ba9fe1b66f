"""One language: words that the project once had for itself, and the field's own for the same things (CONTRIBUTING.md).

They are looked for in the product's code, names and prose alike, and among the names of the examples.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PRODUCT = ("core", "callbacks", "integrations")

OLD = {
    "as_restored": "load_state_dict",
    "beside": "next to, sibling, further",
    "grain": "step size",
    "Healing": "RecoveryEstimate, repair",
    "Held": "ReferenceState",
    "held": "kept, stored, has (held-out is the field's own)",
    "leak": "discount",
    "Leads": "path-metric margins",
    "Occasion": "SaveContext",
    "Outlook": "Prediction",
    "tell": "say, warn, report",
    "telling": "informative",
    "tells": "says, warns, reports",
    "told": "said, warned, reported",
    "unseen": "unread",
    "untouched": "preserved_state, unchanged",
    "went_on": "after_restore, continued",
}
"""Each with what to write instead."""

_WORD = re.compile(r"(?<![A-Za-z.])(" + "|".join(OLD) + r")(?![A-Za-z]|[-_ ]out\b)")
_HELD_OUT = re.compile(r"[Hh]eld[-_ ]out|HELD[-_ ]OUT")
_NAMES = frozenset(name for name in OLD if "_" in name or name[0].isupper())


def sources(*folders: str) -> list[Path]:
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def found(text: str) -> list[tuple[int, str]]:
    """Lines and words."""
    return [
        (number, match[1])
        for number, line in enumerate(text.splitlines(), 1)
        for match in _WORD.finditer(_HELD_OUT.sub("", line))
    ]


@pytest.mark.parametrize("folder", PRODUCT)
def test_product_code_has_the_fields_words(folder: str) -> None:
    assert sources(folder)
    wrong = [
        f"{path.relative_to(ROOT)}:{number}: {word!r}: say {OLD[word]}"
        for path in sources(folder)
        for number, word in found(path.read_text())
    ]
    assert wrong == []


def names(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            yield node.name


def test_names_of_the_examples_do_too() -> None:
    wrong = [
        f"{path.relative_to(ROOT)}: {name}: say {OLD[name.lstrip('_')]}"
        for path in sources("examples")
        for name in sorted(set(names(ast.parse(path.read_text()))))
        if name.lstrip("_") in _NAMES
    ]
    assert wrong == []


def test_the_list_is_looked_for() -> None:
    text = "told\nheld-out loss, held_out\nwithheld, household\n# went_on and held\ntelling\n_Held(1)\n"
    assert found(text) == [(1, "told"), (4, "went_on"), (4, "held"), (5, "telling"), (6, "Held")]
