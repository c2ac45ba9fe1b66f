"""shrinkpoint as a user installs it: a wheel of this tree, in an environment that does not see the tree."""

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

ROOT = Path(__file__).parents[2]
_PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check", "-q")


def environment() -> dict[str, str]:
    """Nothing that leads to this tree."""
    left_out = ("PYTHONPATH", "PYTHONHOME", "NUMBA_CACHE_DIR", "VIRTUAL_ENV")
    return {name: value for name, value in os.environ.items() if name not in left_out} | {
        "OMP_NUM_THREADS": "1"
    }


def built(folder: Path) -> Path:
    """The wheel for all platforms of this tree's files, uncommitted changes too."""
    source = folder / "source"
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=True,
    )
    for name in filter(None, listed.stdout.decode().split("\0")):
        if (ROOT / name).is_file() and not name.startswith(("tests/", "docs/", "examples/")):
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, source / name)
    command = [*_PIP, "wheel", "--no-deps", "--no-build-isolation", "-w", folder, source]
    subprocess.run(command, check=True, cwd=folder, env=environment())
    [wheel] = folder.glob("*.whl")
    return wheel


def installed(wheel: Path, venv: Path) -> Path:
    """The interpreter of a new environment with a wheel, and the packages of this one but shrinkpoint."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", venv], check=True)
    python = venv / "bin" / "python"
    command = [*_PIP, "--python", python, "install", "--no-deps", "--no-index", wheel]
    subprocess.run(command, check=True, env=environment())
    [packages] = venv.glob("lib/python*/site-packages")
    # A path in a .pth file is searched; the .pth files in that folder, the editable install's among them, are not read.
    (packages / "frameworks.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return python
