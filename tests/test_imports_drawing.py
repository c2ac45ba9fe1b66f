"""docs/imports.svg: which of the package's folders import which."""

import importlib.util
from pathlib import Path

import pytest

DOCS = Path(__file__).resolve().parents[1] / "docs"


@pytest.fixture(scope="module")
def imports():
    spec = importlib.util.spec_from_file_location("imports_drawing", DOCS / "imports.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_drawing_shows_the_code_as_it_is_and_no_arrow_leads_up(imports):
    text, upward = imports.drawn()
    assert upward == []
    assert text == (DOCS / "imports.svg").read_text(), "run make imports"
    assert imports._UP not in text


def test_an_import_that_goes_up_is_red_and_named(imports):
    layers = [["top"], ["middle", "other"], ["bottom"]]
    arrows = {"top": {"middle", "bottom"}, "middle": {"bottom"}, "other": set(), "bottom": {"middle"}}
    arrows = {name: frozenset(found) for name, found in arrows.items()}
    assert imports.upward(layers, arrows) == ["bottom -> middle"]
    assert imports.drawing(layers, arrows).count(f'stroke="{imports._UP}"') == 1


def test_arrows_that_follow_from_others_are_left_out(imports):
    arrows = {"a": frozenset("bc"), "b": frozenset("c"), "c": frozenset("d"), "d": frozenset()}
    assert imports.without_detours(arrows) == {("a", "b"), ("b", "c"), ("c", "d")}
    assert len(imports.layers_of(DOCS.parent / "pyproject.toml")) > 10
