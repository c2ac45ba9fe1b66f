"""What `make docs` checks and does beyond mkdocs: every public name is documented, and files of the root become pages."""

import re
from pathlib import Path
from typing import Any

import griffe
from mkdocs.exceptions import PluginError

ROOT = Path(__file__).parents[1]
PUBLIC = (
    "shrinkpoint",
    "shrinkpoint.callbacks.composer",
    "shrinkpoint.callbacks.lightning",
    "shrinkpoint.callbacks.transformers",
    "shrinkpoint.errors",
    "shrinkpoint.store.objects",
)
"""Modules whose ``__all__`` is for users. Further names that docs/reference shows need a docstring as well."""

FORMULA = re.compile(r"(`[^`]*`)|(?<=\w)(\[\w+\])(?=\[)")
"""Code, which stays as it is, or an index before another one."""


def on_config(config: Any) -> None:
    """Refuse to build if a public name has no place in docs/reference, or no docstring."""
    package = griffe.load("shrinkpoint")
    shown = {}
    for page in Path(config.docs_dir, "reference").glob("*.md"):
        for name in re.findall(r"^::: (\S+)", page.read_text(encoding="utf-8"), flags=re.MULTILINE):
            thing = _find(package, name)
            shown[thing.path] = thing
    wanted = {name for module in PUBLIC for name in _exports(package, module)}
    if missing := sorted(name for name in wanted if _find(package, name).path not in shown):
        raise PluginError(f"in no page of docs/reference: {', '.join(missing)}")
    if bare := sorted(path for thing in shown.values() for path in _without_docstring(thing)):
        raise PluginError(f"without a docstring: {', '.join(bare)}")


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """A page that names a file of the repository's root as its ``source`` is that file; ``x[i][j]`` is no reference."""
    if source := page.meta.get("source"):
        markdown = re.sub(r"\]\((\.\./)*docs/", "](", (ROOT / source).read_text(encoding="utf-8"))
    return FORMULA.sub(lambda found: found[1] or f"{found[2]}\\", markdown)


def _find(package: griffe.Module, name: str) -> griffe.Object:
    """What a public name stands for, where it is defined."""
    try:
        thing = package if name == package.path else package[name.removeprefix(f"{package.path}.")]
        return thing.final_target if thing.is_alias else thing
    except (KeyError, griffe.AliasResolutionError) as error:
        raise PluginError(f"docs/reference names {name}, which there is not: {error}") from error


def _exports(package: griffe.Module, module: str) -> list[str]:
    names = (str(name) for name in _find(package, module).exports or ())
    return [f"{module}.{name}" for name in names if name != "__version__"]


def _without_docstring(thing: griffe.Object) -> list[str]:
    """The object itself, and the public functions, properties and fields of a class, as far as they have none."""
    if not thing.has_docstring:
        return [thing.path]
    sections = thing.docstring.parse("google")
    described = {item.name for part in sections if part.kind.value == "attributes" for item in part.value}
    members = thing.members.items() if thing.is_class else ()
    public = [
        part for name, part in members if not (name in described or name.startswith("_") or part.is_alias)
    ]
    return [part.path for part in public if not part.has_docstring]
