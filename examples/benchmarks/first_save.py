"""What the first restore and save on a fresh machine cost: python examples/benchmarks/first_save.py (some minutes)

There the coders are compiled first. Printed are CPU seconds, of all threads and children, in fresh processes with an empty cache of
compiled code and once more with what the first one has left there: of a process that restores a base and two deltas of scheme
``auto``, of one that makes and restores them, of ``shrinkpoint compile``, and of one that only imports numba and shrinkpoint.
"""

import os
import resource
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path

import torch
from common import parsed
from torch import nn

from shrinkpoint import Saver, SaverConfig
from shrinkpoint.errors import ShrinkpointWarning
from shrinkpoint.state.roles import describe_training


def save(folder: str, saves: int = 3) -> None:
    """Make checkpoints of a small training with the defaults of scheme ``auto``, compiling in this process."""
    warnings.simplefilter("ignore", ShrinkpointWarning)  # that nothing is evaluated
    torch.set_num_threads(1)
    torch.manual_seed(0)
    parts = nn.Embedding(2000, 128), nn.Linear(128, 512), nn.GELU(), nn.Linear(512, 128), nn.LayerNorm(128)
    model = nn.Sequential(*parts, nn.Linear(128, 2000))
    optimizer = torch.optim.AdamW(model.parameters())
    describe = describe_training(model, [optimizer], model_path=("model",), optimizers_path=("optimizers",))
    saver = Saver(folder, SaverConfig())
    for number in range(saves):
        for _ in range(10):
            tokens = torch.randint(2000, (64,))
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(tokens), tokens.roll(1)).backward()
            optimizer.step()
        state = {"model": model.state_dict(), "optimizers": [optimizer.state_dict()]}
        saver.save(state, step=10 * number + 10, describe=describe, wait=True)
    saver.close()


def cpu_seconds(command: list[str], cache: str) -> float:
    """User and system time of a process and its children."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    environment = {**os.environ, "NUMBA_CACHE_DIR": cache, "PYTHONWARNINGS": "ignore"}
    subprocess.run(command, env=environment, check=True, stdout=subprocess.DEVNULL)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    options = parsed(__doc__, run="", folder="")  # of the processes that it starts itself
    if options.run == "restore":
        Saver(options.folder).restore()
        return
    with tempfile.TemporaryDirectory() as folder:
        run = str(Path(folder) / "run")
        save(run)
        if options.run == "auto":
            Saver(run).restore()
            return
        again = "import sys; sys.argv[0] = 'shrinkpoint'; from shrinkpoint.cli.app import app; app()"
        rows = {
            "imports": [sys.executable, "-c", "import numba, shrinkpoint"],
            "a restore": [sys.executable, __file__, "--run", "restore", "--folder", run],
            "all that auto needs": [sys.executable, __file__, "--run", "auto"],
            "shrinkpoint compile": [sys.executable, "-c", again, "compile"],
        }
        print("CPU seconds           empty cache   filled")
        for name, command in rows.items():
            with tempfile.TemporaryDirectory() as cache:
                empty, filled = cpu_seconds(command, cache), cpu_seconds(command, cache)
            print(f"{name:20} {empty:12.1f} {filled:8.1f}", flush=True)


if __name__ == "__main__":
    main()
