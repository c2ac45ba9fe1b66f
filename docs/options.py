"""Writes docs/options.md from the docstrings of the options. `python docs/options.py`; a test compares."""

from __future__ import annotations

import ast
import inspect
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
OUT = ROOT / "docs" / "options.md"

_HEAD = """# Options

<!-- written by docs/options.py from the docstrings -->

Most trainings need `url` and a schedule. Except for the schedule, names and defaults are the same everywhere. Further
options stand in `Advanced`, `Stores`, `StepLog` and the [options of a scheme](reference/config.md). In YAML each is a mapping of its
fields.

```python
from shrinkpoint import Advanced, Stores
from shrinkpoint.schemes.catalogue import ExcpOptions

CompressedCheckpoint(
    Stores(["/mnt/a/run-7", "/mnt/b/run-7", "/mnt/c/run-7"], parity=1),
    scheme=ExcpOptions(alpha=1e-4),
    advanced=Advanced(busy="wait"),
)
```

```yaml
# of LightningCLI
trainer:
  callbacks:
    - class_path: shrinkpoint.callbacks.lightning.CompressedCheckpoint
      init_args:
        url: {urls: [/mnt/a/run-7, /mnt/b/run-7, /mnt/c/run-7], parity: 1}
        train_time_interval: "0:30:00"
        scheme: {name: excp, alpha: 1.0e-4}
        advanced: {busy: wait}
```

- **Schedules** exclude each other: give one. Without one Lightning and Composer save after each epoch, the Trainer as its
  `save_strategy` says, and `Checkpointer` on `save` only.
- **Metrics** for `monitor` have the names that are logged. Composer's are `metrics/eval/LanguagePerplexity`, `loss/train/total`, or an eval
  metric's bare name. With Hugging Face `eval_` may be left out. `Checkpointer` gets them as `step(..., metrics={"val_loss": loss})`.
- **`Checkpointer`** takes further objects by name (`scheduler=`, a stateful `loader=`), and goes back with `resume(step=3000)`.
  With DDP each process makes one of the wrapper.
"""
_WAYS = {
    "Lightning": ("callbacks/lightning.py", "CompressedCheckpoint"),
    "Composer": ("callbacks/composer.py", "CompressedCheckpoint"),
    "Hugging Face": ("callbacks/transformers.py", "CompressedCheckpoint"),
    "own loop": ("core/checkpointer.py", "Checkpointer"),
}
_GROUPS = {
    "Advanced": ("core/config.py", "Passed as `advanced=`."),
    "Stores": ("core/store/urls.py", "Passed as `url`."),
    "StepLog": ("core/steps/options.py", "Passed as `step_log=`."),
}
_OBJECTS = {"model", "optimizer", "stateful"}  # of a loop: what is saved, and no options


def _class(path: str, name: str) -> ast.ClassDef:
    body = ast.parse((ROOT / path).read_text(encoding="utf-8")).body
    return next(node for node in body if isinstance(node, ast.ClassDef) and node.name == name)


def _arguments(node: ast.ClassDef) -> dict[str, str]:
    """The constructor's arguments with their documentation."""
    text = inspect.cleandoc(ast.get_docstring(node) or "")
    part = re.split(r"^(?:Raises|Returns|Examples):$", text.split("\nArgs:\n")[1], flags=re.M)[0]
    found = re.findall(r"^    (\w[\w, ]*): (.*(?:\n(?!    \w[\w, ]*: ).*)*)", part, flags=re.M)
    texts = {name: _line(words) for names, words in found for name in names.split(", ")}
    arguments = [each.arg for each in (*_init(node).args.args[1:], *_init(node).args.kwonlyargs)]
    return {name: texts.get(name, "as of Checkpointer") for name in arguments if name not in _OBJECTS}


def _init(node: ast.ClassDef) -> ast.FunctionDef:
    return next(each for each in node.body if isinstance(each, ast.FunctionDef) and each.name == "__init__")


def _defaults(node: ast.ClassDef) -> dict[str, str]:
    init = _init(node)
    pairs = zip(init.args.kwonlyargs, init.args.kw_defaults, strict=True)
    return {name.arg: ast.unparse(value) for name, value in pairs if value is not None}


def _fields(node: ast.ClassDef) -> list[tuple[str, str, str]]:
    """Each field's name, default and documentation."""
    rows = []
    for item, after in zip(node.body, node.body[1:], strict=False):
        if isinstance(item, ast.AnnAssign) and isinstance(after, ast.Expr):
            assert isinstance(item.target, ast.Name)
            assert isinstance(after.value, ast.Constant)
            default = "" if item.value is None else f"`{ast.unparse(item.value)}`"
            rows.append((item.target.id, default, _line(str(after.value.value))))
    return rows


def _line(text: str) -> str:
    linked = re.sub(r"docs/((\w+)\.md)", r"[\2](\1)", text)
    return re.sub(r"\s+", " ", linked).strip().replace("``", "`").replace("|", "\\|")


def page() -> str:
    """The text of docs/options.md."""
    lines = [_HEAD, "## Every way in\n", "| option | default | where | meaning |", "|---|---|---|---|"]
    ways = {way: _class(*place) for way, place in _WAYS.items()}
    documented = {way: _arguments(node) for way, node in ways.items()}
    defaults = {name: value for node in ways.values() for name, value in _defaults(node).items()}
    for name in dict.fromkeys(name for options in documented.values() for name in options):
        where = [way for way, options in documented.items() if name in options]
        shown = "all" if len(where) == len(ways) else ", ".join(where)
        default = f"`{defaults[name]}`" if name in defaults else ""
        [text, *_] = (text for way in where if not (text := documented[way][name]).startswith("as of "))
        lines.append(f"| `{name}` | {default} | {shown} | {text} |")
    for name, (path, how) in _GROUPS.items():
        lines += [f"\n## `{name}`\n", f"{how}\n", "| field | default | meaning |", "|---|---|---|"]
        lines += [
            f"| `{field}` | {default} | {text} |" for field, default, text in _fields(_class(path, name))
        ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    OUT.write_text(page(), encoding="utf-8")
