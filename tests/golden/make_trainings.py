"""Records what saves of made-up trainings store, and what is chosen from the losses of real ones. Run by hand.

    python tests/golden/make_trainings.py [--decisions]

These files may be made again whenever a change of bytes or decisions is meant: no released format depends on them. With ``--decisions``
trainings of the bench of the bound are made in their quick form (three minutes), whose losses depend on the machine; else their
recorded losses are kept, and what is chosen from them is recorded anew.
"""

import json
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"
HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

from support.golden_decisions import RECORDED, record, replay
from support.golden_trainings import GOLDEN, made

FOLDER = HERE / "trainings"


def written(file: str, names: list[str], make: Callable[[str, Any, Path], Any]) -> None:
    """Make the record of each name by what was recorded before, and write all."""
    path = FOLDER / file
    known = json.loads(path.read_text()) if path.exists() else {}
    for name in names:
        with tempfile.TemporaryDirectory() as folder:
            known[name] = make(name, known.get(name), Path(folder) / "run")
    lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(known[name])}" for name in names if name in known)
    path.write_text(f"{{\n{lines}\n}}\n")


def decided(name: str, known: Any, folder: Path) -> Any:
    return {**known, "saves": replay(name, known, folder)}


if __name__ == "__main__":
    real = "--decisions" in sys.argv
    written("containers.json", list(GOLDEN), lambda name, _, folder: made(GOLDEN[name], folder))
    written(
        "decisions.json", list(RECORDED), (lambda name, _, folder: record(name, folder)) if real else decided
    )
