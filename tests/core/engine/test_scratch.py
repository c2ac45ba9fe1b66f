"""Saves with `scratch_folder`: the same files, in less memory, whatever happens to the disk."""

import gc
import json
import os
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from support import scratch_memory
from support.baseline_schemes import BASELINES
from support.optimizers import Lion
from support.options import grouped
from support.training import OPTIMIZERS, TinyGPT, train

from shrinkpoint.checkpointer import Checkpointer
from shrinkpoint.errors import SaveFailedError
from shrinkpoint.saver import Saver
from shrinkpoint.schemes.catalogue import SCHEMES
from shrinkpoint.state import scratch
from shrinkpoint.state.scratch import DiskArrays, DiskTensor, Scratch
from shrinkpoint.state.snapshot import Snapshot, Snapshotter
from shrinkpoint.state.training import Role, TrainingState

PEAK = 1.25
KINDS = {
    **OPTIMIZERS,
    "Lion": lambda model: Lion(model.parameters()),
    "ASGD": lambda model: torch.optim.ASGD(model.parameters(), t0=2),
}
SLOW = {"itmo"}
BY_TIME = {"inshrinkerator"}
"""How far their search gets depends on the time."""


@pytest.fixture(autouse=True)
def _all_are_large(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("state.snapshot", "engine.background"):
        monkeypatch.setattr(f"shrinkpoint.{module}.LARGE", 1)
    monkeypatch.setattr(scratch, "_LEAST", 64)


class Loop:
    """A training of a small model that is saved."""

    exactly = False

    def __init__(
        self, folder: Path, scheme: str = "auto", optimizer: str = "AdamW", **options: object
    ) -> None:
        torch.manual_seed(0)
        self.model = TinyGPT().to(options.pop("dtype", torch.float32))
        self.optimizer = KINDS[optimizer](self.model)
        self.folder = folder
        if options.pop("probed", False):
            options["train_loss"] = self.model.loss
        self.checkpointer = Checkpointer(
            str(folder),
            self.model,
            self.optimizer,
            **grouped(scheme=scheme, evaluate=lambda: float(self.model.loss(99)), **options),
        )
        self.step = self.checkpointer.resume()

    def save(self, saves: int = 1) -> "Loop":
        for _ in range(saves):
            self.step += 1
            train(self.model, self.optimizer, range(10 * self.step, 10 * self.step + 5))
            self.checkpointer.save(self.step, exact=self.exactly, wait=True)
        return self

    def close(self) -> list[bytes]:
        """The containers."""
        self.checkpointer.close()
        found = sorted((self.folder / "data").rglob("*"), key=lambda file: file.name)
        return [file.read_bytes() for file in found if file.is_file()]

    @property
    def kinds(self) -> list[str]:
        return [report.kind for report in self.checkpointer.reports()]

    @property
    def background(self) -> object:
        return self.checkpointer.saver._background


def restores(folder: Path) -> int:
    """The step of the newest checkpoint, every digest of which is right."""
    restored = Saver(str(folder)).restore()
    assert restored is not None
    return restored.manifest.step


@pytest.fixture
def disk(tmp_path: Path) -> Path:
    (tmp_path / "disk").mkdir()
    return tmp_path / "disk"


@pytest.mark.filterwarnings("ignore:there is no way to evaluate", "ignore:.* is stored exactly")
@pytest.mark.parametrize(
    "scheme",
    [
        pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW))
        for name in sorted({*SCHEMES, *BASELINES} - BY_TIME)
    ],
)
def test_the_files_are_the_same(tmp_path: Path, disk: Path, scheme: str) -> None:
    options = {"guards": scheme == "auto"}  # which refuse most published schemes here
    without = Loop(tmp_path / "without", scheme, **options).save(3).close()
    loop = Loop(tmp_path / "with", scheme, scratch_folder=disk, **options).save(3)
    assert loop.close() == without
    assert len(without) == 3
    assert not list(disk.iterdir())


OTHERS: list[tuple[dict[str, object], int]] = [
    *(({"optimizer": name}, 0) for name in sorted({*KINDS} - {"AdamW"})),
    ({"dtype": torch.bfloat16}, 0),
    ({"dtype": torch.float64}, 0),
    ({"keep_optimizer": 0}, 0),
    ({"large": 1 << 40}, 0),  # so that all are small
    ({}, 1),  # the second one asked for bit-exactly
    ({}, 2),  # resumed before it
]


@pytest.mark.parametrize(("options", "then"), OTHERS, ids=str)
def test_the_files_of_other_trainings_are_the_same(
    tmp_path: Path, disk: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, object], then: int
) -> None:
    if "large" in options:
        monkeypatch.setattr("shrinkpoint.state.snapshot.LARGE", options["large"])

    def run(name: str, **more: object) -> list[bytes]:
        given = {key: value for key, value in {**options, **more}.items() if key != "large"}
        loop = Loop(tmp_path / name, **given).save()
        loop.exactly = then == 1
        if then == 2:
            loop.close()
            loop = Loop(tmp_path / name, **given)
        loop.save()
        assert loop.kinds[-1] == "delta"
        return loop.close()

    assert run("with", scratch_folder=disk) == run("without")


def test_a_probe_trains_from_the_same_states(tmp_path: Path, disk: Path) -> None:
    options = {"probed": True, "search_overhead": 1.0}
    without, loop = (
        Loop(tmp_path / name, **options, **more).save(2)
        for name, more in (("without", {}), ("with", {"scratch_folder": disk}))
    )
    resumed = [[report.resumed for report in each.checkpointer.reports()] for each in (without, loop)]
    assert resumed[0][0]
    assert resumed[0] == resumed[1]
    assert without.close() == loop.close()


@pytest.mark.parametrize(("kind", "scheme"), [("small", "auto"), ("exact", "lossless")])
def test_a_training_with_a_step_log_too(tmp_path: Path, disk: Path, kind: str, scheme: str) -> None:
    def run(name: str, **options: object) -> list[bytes]:
        loop = Loop(tmp_path / name, scheme, step_log=kind, log_url=str(tmp_path / f"log {name}"), **options)
        for step in range(1, 7):
            train(loop.model, loop.optimizer, [step])
            loop.checkpointer.step(step)
            if step % 3 == 0:
                loop.checkpointer.save(step, wait=True)
        return loop.close()

    without, found = run("without"), run("with", scratch_folder=disk)
    assert len(without) == len(found)
    assert restores(tmp_path / "with") == 6


@pytest.mark.parametrize("scheme", ["auto", "lossless", "inshrinkerator"])
def test_between_saves_nothing_is_in_memory(tmp_path: Path, disk: Path, scheme: str) -> None:
    loop = Loop(tmp_path / "run", scheme, scratch_folder=disk)
    for _ in range(3):
        loop.save()
        link, noted = loop.background.link, loop.background.movement.noted
        assert bool(noted) == (scheme != "lossless")
        assert all(isinstance(t, DiskTensor) for t in noted.values() if t.nbytes >= 64)
        held = sum(reference.nbytes for reference in link.reference.values())
        assert held < sum(p.nbytes for p in loop.model.parameters()) / 20
    loop.close()


def test_moments_are_let_go_of_before_a_candidate_is_made(
    tmp_path: Path, disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[dict[str, weakref.ref[torch.Tensor]]] = []
    there: list[set[str]] = []
    take, plan = Snapshotter.take, Loop(tmp_path / "other").background.planner.__class__.plan

    def watched(self: Snapshotter, state: TrainingState) -> Snapshot:
        snapshot = take(self, state)
        taken.append({name: weakref.ref(tensor) for name, tensor in snapshot.state.tensors.items()})
        return snapshot

    def planned(self: object, save_context: object, *arguments: object, **options: object) -> object:
        gc.collect()
        there.append({name for name, tensor in taken[-1].items() if tensor() is not None})
        moments = {
            name
            for name, spec in save_context.state.specs.items()
            if spec.tag.role in (Role.EXP_AVG, Role.EXP_AVG_SQ) and spec.nbytes >= 64
        }
        assert moments
        assert not moments & there[-1]
        weights = {n for n, s in save_context.state.specs.items() if s.tag.role is Role.WEIGHT}
        assert weights <= there[-1]  # the snapshot's own weights are in memory
        return plan(self, save_context, *arguments, **options)

    monkeypatch.setattr(Snapshotter, "take", watched)
    monkeypatch.setattr("shrinkpoint.quality.planner.Planner.plan", planned)
    Loop(tmp_path / "run", scratch_folder=disk).save(2).close()
    assert len(there) == 2


def test_the_training_thread_writes_none_of_a_snapshot(
    tmp_path: Path, disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = Loop(tmp_path / "run", scratch_folder=disk)
    writers: set[threading.Thread] = set()
    put = scratch.ScratchFile.put

    def watched(self: scratch.ScratchFile, data: object) -> object:
        writers.add(threading.current_thread())
        return put(self, data)

    monkeypatch.setattr(scratch.ScratchFile, "put", watched)
    loop.save(2).close()
    assert writers
    assert threading.main_thread() not in writers


# ---- trouble with the disk


def after(calls: int, what: Callable[..., object], then: Callable[..., object]) -> Callable[..., object]:
    """A function that does something else from some call on."""
    made = iter(range(10**9))

    def called(*arguments: object) -> object:
        return (what if next(made) < calls else then)(*arguments)

    return called


def failing(*_: object) -> int:
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize("calls", [0, 1, 5, 20, 40, 70])
def test_a_full_disk_costs_memory_and_no_save(
    tmp_path: Path,
    disk: Path,
    monkeypatch: pytest.MonkeyPatch,
    calls: int,
    warned_in_background: list[Warning],
) -> None:
    without = Loop(tmp_path / "without").save(3).close()
    loop = Loop(tmp_path / "with", scratch_folder=disk)
    monkeypatch.setattr(os, "pwrite", after(calls, os.pwrite, failing))
    with pytest.warns(match="nothing more could be written") as told:
        assert loop.save(3).close() == without
    assert len([w for w in told if "nothing more" in str(w.message)]) == 1
    warned_in_background.clear()


def damaged(file: scratch.ScratchFile) -> None:
    """Another byte in the middle of everything that was written."""
    descriptor = file._file.fileno()
    for offset in range(20, os.fstat(descriptor).st_size, 50):
        os.pwrite(descriptor, bytes([os.pread(descriptor, 1, offset)[0] ^ 64]), offset)


def file_of_planes(loop: Loop) -> scratch.ScratchFile:
    references = loop.background.link.reference.values()
    arrays = [getattr(each.planes, "_parts", each.planes) for each in references]
    found = [a for each in arrays if isinstance(each, DiskArrays) for a in each._arrays.values()]
    return next(each[0].file for each in found if isinstance(each, tuple))


@pytest.mark.parametrize("scheme", ["auto", "lossless"])
def test_after_damaged_planes_a_base_follows(
    tmp_path: Path, disk: Path, scheme: str, warned_in_background: list[Warning]
) -> None:
    loop = Loop(tmp_path / "run", scheme, scratch_folder=disk).save(2)
    damaged(file_of_planes(loop))
    with pytest.warns(match=r"gives back other bytes .* Step 3 is stored as a base"):
        loop.save()
    loop.save()
    loop.close()
    assert loop.kinds == ["base", "delta", "base", "delta"]
    assert restores(tmp_path / "run") == 4
    for step in (2, 3):
        assert Saver(str(tmp_path / "run")).restore(step) is not None
    warned_in_background.clear()


def test_without_the_weights_of_before_the_movement_is_not_known(
    tmp_path: Path, disk: Path, warned_in_background: list[Warning]
) -> None:
    loop = Loop(tmp_path / "run", scratch_folder=disk).save(2)
    noted = loop.background.movement.noted.values()
    damaged(next(tensor for tensor in noted if isinstance(tensor, DiskTensor))._place.file)
    with pytest.warns(match=r"other bytes .*How far training has moved .* is not known at step 3"):
        loop.save()
    loop.save().close()
    assert len(loop.kinds) == 4
    assert restores(tmp_path / "run") == 4
    warned_in_background.clear()


@pytest.mark.parametrize("number", range(3))
def test_after_damaged_moments_that_save_fails_and_the_next_one_is_a_base(
    tmp_path: Path,
    disk: Path,
    monkeypatch: pytest.MonkeyPatch,
    number: int,
    warned_in_background: list[Warning],
) -> None:
    loop = Loop(tmp_path / "run", scratch_folder=disk).save(1)
    moments = Scratch.moments

    def spoiled(self: Scratch, snapshot: Snapshot, state: TrainingState) -> TrainingState:
        found = moments(self, snapshot, state)
        tensors = [tensor for tensor in found.tensors.values() if isinstance(tensor, DiskTensor)]
        place = tensors[number * (len(tensors) - 1) // 2]._place
        os.pwrite(place.file._file.fileno(), b"\x77\x66\x55", place.offset + 12)
        return found

    with monkeypatch.context() as patched:
        patched.setattr(Scratch, "moments", spoiled)
        for _ in range(2):
            with pytest.warns(match=r"saving step [23] .* failed .*scratch_folder=.*other bytes"):
                loop.save()
        with pytest.raises(SaveFailedError, match=r"scratch_folder=.*leave scratch_folder out"):
            loop.save()
    assert loop.kinds == ["base"]
    loop.save()
    assert loop.kinds == ["base", "base"]
    with suppress(SaveFailedError):
        loop.close()
    assert restores(tmp_path / "run") == loop.step
    warned_in_background.clear()


# ---- how much memory it takes


def memory_of(folder: Path, scratch_folder: str) -> list[tuple[float, float]]:
    """At most during each save, and after it, in sizes of the state."""
    program = Path(scratch_memory.__file__)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, str(program), str(folder), scratch_folder],
        check=True,
        capture_output=True,
        text=True,
        env=environment,
        timeout=280,
    )
    state, kinds, found = json.loads(done.stdout)
    assert 1 << 27 < state < 1.1 * (1 << 27)
    assert kinds == ["base", "delta", "delta"]
    return found


@pytest.mark.slow
@pytest.mark.long
def test_a_save_takes_little_more_than_its_snapshot(tmp_path: Path, disk: Path) -> None:
    with_folder, without = memory_of(tmp_path / "with", str(disk)), memory_of(tmp_path / "without", "")
    assert all(most <= PEAK and later <= 1 for most, later in with_folder), with_folder
    assert all(most > PEAK for most, _ in without), without
