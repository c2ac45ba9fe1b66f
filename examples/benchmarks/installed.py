"""What an installed shrinkpoint takes: python examples/benchmarks/installed.py, by the interpreter of the environment

Printed are megabytes on the disk, of shrinkpoint, of what it needs besides torch, and of torch with what that needs, and the seconds in
which a process that has imported torch imports shrinkpoint, the least of several processes. It needs nothing but shrinkpoint.
"""

import re
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, distribution

TIMED = "import time, torch; began = time.perf_counter(); import shrinkpoint{}; print(time.perf_counter() - began)"


def needed(name: str, found: set[str]) -> set[str]:
    """Collect a distribution and what it needs, without extras; by their names."""
    try:
        requires = distribution(name).requires or ()
    except PackageNotFoundError:  # of another platform or Python
        return found
    found.add(name)
    for other in (re.split(r"[^\w.-]", line)[0].lower() for line in requires if "extra ==" not in line):
        if other not in found:
            needed(other, found)
    return found


def megabytes(names: set[str]) -> float:
    files = [file.locate() for name in names for file in distribution(name).files or ()]
    return sum(file.stat().st_size for file in files if file.is_file()) / 1e6


own, torch, all_of_it = {"shrinkpoint"}, needed("torch", set()), needed("shrinkpoint", set())
print(f"Python {sys.version.split()[0]}, torch {distribution('torch').version}")
for title, part in (("shrinkpoint", own), ("what it needs", all_of_it - torch - own), ("torch", torch)):
    print(f"{title:26} {megabytes(part):8.1f} MB")
for title, more in (("import shrinkpoint", ""), ("shrinkpoint.Checkpointer", "; shrinkpoint.Checkpointer")):
    command = [sys.executable, "-c", TIMED.format(more)]
    times = [float(subprocess.run(command, check=True, capture_output=True).stdout) for _ in range(5)]
    print(f"{title:26} {min(times):8.2f} s")
