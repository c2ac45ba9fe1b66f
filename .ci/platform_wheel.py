"""Makes a wheel for one platform and one Python of the wheel for all: python .ci/platform_wheel.py dist/*-none-any.whl

It contains compiled kernels beside the sources (`shrinkpoint.runtime.kernel_cache`), by the numba of the interpreter that
runs this script, whose environment needs shrinkpoint's dependencies and ``wheel``. Where the same numba is installed, a
restore and a save compile nothing; elsewhere the wheel is as good as the one for all. Its tags are those of the installed
numba's own wheel: what can load that can load these kernels.
"""

import argparse
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from importlib.metadata import distribution
from pathlib import Path

_COMPILE = """
import sys
from pathlib import Path
import shrinkpoint
from shrinkpoint.runtime.kernel_cache import LEVELS
from shrinkpoint.engine.warmup import precompile
package = Path(sys.argv[1])
assert Path(shrinkpoint.__file__).parent.samefile(package), shrinkpoint.__file__
print("compiled functions:", precompile(package))
"""


def tags() -> list[str]:
    """As the ``WHEEL`` file lists them."""
    text = distribution("numba").read_text("WHEEL") or ""
    found = [line for line in text.splitlines() if line.startswith("Tag: ")]
    if not found or any(line.endswith("-any") for line in found):
        raise SystemExit("the installed numba does not come from a wheel of a platform")
    return found


def make(wheel: Path, out: Path) -> Path:
    """Add the kernels, and pack it again."""
    from shrinkpoint.runtime.kernel_cache import LEVELS

    if platform.machine() not in LEVELS:
        raise SystemExit(
            f"no level of processors is known for {platform.machine()}: see shrinkpoint.runtime.kernel_cache"
        )
    with tempfile.TemporaryDirectory() as folder:
        pack = [sys.executable, "-m", "wheel"]
        subprocess.run([*pack, "unpack", "--dest", folder, wheel], check=True, stdout=subprocess.DEVNULL)
        [tree] = Path(folder).iterdir()
        environment = {name: value for name, value in os.environ.items() if not name.startswith("NUMBA_")} | {
            "PYTHONPATH": str(tree),
            "PYTHONDONTWRITEBYTECODE": "1",
            "NUMBA_CACHE_DIR": str(Path(folder) / "cache"),
            "NUMBA_CPU_NAME": LEVELS[platform.machine()].name,
            "NUMBA_CPU_FEATURES": "",
        }
        command = [sys.executable, "-c", _COMPILE, str(tree / "shrinkpoint")]
        subprocess.run(command, check=True, cwd=folder, env=environment)
        [info] = tree.glob("*.dist-info")
        others = [
            line
            for line in (info / "WHEEL").read_text().splitlines()
            if line and not line.startswith(("Tag: ", "Root-Is"))
        ]
        (info / "WHEEL").write_text("\n".join([*others, "Root-Is-Purelib: false", *tags()]) + "\n")
        packed = Path(folder) / "packed"
        packed.mkdir()
        subprocess.run([*pack, "pack", "--dest-dir", packed, tree], check=True, stdout=subprocess.DEVNULL)
        [made] = packed.glob("*.whl")
        out.mkdir(parents=True, exist_ok=True)
        return Path(shutil.move(made, out / made.name))


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("wheel", type=Path, help="the wheel for all platforms")
    parser.add_argument(
        "--out", type=Path, default=Path("dist"), help="folder of the new wheel (default: dist)"
    )
    options = parser.parse_args()
    made = make(options.wheel.resolve(), options.out.resolve())
    print(f"{made} ({made.stat().st_size / 1e6:.1f} MB)")


if __name__ == "__main__":
    main()
