"""Trainings that share a URL without going on from each other: neither removes the other's checkpoints."""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from support.fake_objects import FakeObjects
from support.options import grouped
from support.training import OPTIMIZERS, TinyMLP, train
from typer.testing import CliRunner

from shrinkpoint.checkpointer import Checkpointer
from shrinkpoint.cli.app import app
from shrinkpoint.errors import NoCheckpointError
from shrinkpoint.saver import Saver
from shrinkpoint.store.gc import DEFAULT_GRACE_S
from shrinkpoint.store.retry import RetryPolicy
from shrinkpoint.store.run import RunStore


def training(url: Path, until: int, *, size: int = 64, forget: bool = False, **options: Any) -> list[str]:
    """A process that saves after each step, and what it warned of."""
    torch.manual_seed(0)
    model = TinyMLP(size)
    optimizer = OPTIMIZERS["SGD"](model)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        checkpointer = Checkpointer(
            str(url), model, optimizer, **grouped(scheme="lossless", **{"keep_last": 2, **options})
        )
        start = 0 if forget else checkpointer.resume()
        for step in range(start, until):
            train(model, optimizer, range(step, step + 1))
            checkpointer.save(step + 1, wait=True)
        checkpointer.close()
    return [str(one.message) for one in told]


def steps(url: Path) -> list[int]:
    return [manifest.step for manifest in RunStore(url).manifests()]


def test_a_run_that_is_continued_is_collected(tmp_path: Path) -> None:
    training(tmp_path, 3)
    assert steps(tmp_path) == [3, 2]
    assert training(tmp_path, 5, resume="must") == []
    assert steps(tmp_path) == [5, 4]


@pytest.mark.parametrize(
    "how", [{"resume": "never"}, {"forget": True}, {"forget": True, "size": 32}], ids=str
)
def test_a_run_that_is_not_continued_stays(tmp_path: Path, how: dict[str, Any]) -> None:
    training(tmp_path, 8)
    (said,) = training(tmp_path, 4, **how)
    assert "2 checkpoints, the newest of step 8" in said
    assert "resume='must'" in said
    assert "another URL" in said
    assert steps(tmp_path) == [4, 3, 8, 7]
    for step in (8, 7):
        assert Saver(str(tmp_path)).restore(step) is not None


def test_the_newcomer_is_continued_and_judges_its_own_alone(tmp_path: Path) -> None:
    training(tmp_path, 8)
    training(tmp_path, 2, resume="never")
    assert training(tmp_path, 5) == []
    assert steps(tmp_path) == [5, 4, 8, 7]


def test_one_saver_that_forgets_begins_another_training(tmp_path: Path) -> None:
    training(tmp_path, 8)
    saver = Saver(str(tmp_path))
    restored = saver.restore()
    assert restored is not None
    first = saver.lineage
    assert first is not None
    saver.forget()
    assert saver.lineage is None
    saver.forget(follows=restored.manifest)
    assert saver.lineage == first
    saver.close()


# ---- what was removed comes back


def undelete(url: Path, *more: str) -> Any:
    return CliRunner().invoke(app, ["undelete", str(url), *more])


def test_undelete(tmp_path: Path) -> None:
    training(tmp_path, 4, keep_last=1)
    assert steps(tmp_path) == [4]
    told = undelete(tmp_path)
    assert (told.exit_code, steps(tmp_path)) == (0, [4])
    assert "--yes" in told.output
    assert undelete(tmp_path, "--step", "2", "--yes").exit_code == 0
    assert steps(tmp_path) == [4, 2]
    assert undelete(tmp_path, "--yes").exit_code == 0
    assert steps(tmp_path) == [4, 3, 2, 1]
    for step in (1, 2, 3, 4):
        assert Saver(str(tmp_path)).restore(step) is not None
    nothing = undelete(tmp_path, "--yes")
    assert nothing.exit_code == 1
    assert training(tmp_path, 6, keep_last=None) == []
    assert steps(tmp_path) == [6, 5, 4, 3, 2, 1]


def test_undelete_ends_where_the_data_is_gone() -> None:
    fake = FakeObjects()
    store = RunStore("ignored", objects=fake, retry=RetryPolicy(attempts=1))
    writer = store.writer()

    def base(step: int) -> Any:
        return writer.commit(b"%d" % step, step=step, kind="base", parent=None, state_digest="", meta={})

    first, second, third = base(1), base(2), base(3)
    fake.now += 2 * DEFAULT_GRACE_S
    writer.collect([third.seq])
    assert store.removed() == [second, first]
    del fake.blobs[first.chain[0].key]
    assert store.removed() == [second]
    with pytest.raises(NoCheckpointError, match="deleted for good"):
        writer.undelete(first)
    assert store.manifests() == [third]
    fake.now += DEFAULT_GRACE_S / 2
    writer.undelete(second)
    writer.undelete(second)
    assert store.manifests() == [third, second]
    fake.now += DEFAULT_GRACE_S
    assert writer.collect([third.seq, second.seq]).blobs_removed == ()
    assert store.removed() == []
    assert store.fetch(second) == [b"2"]


def test_undelete_where_the_number_is_collected_meanwhile() -> None:
    """Between the attempt to take it, and the look at who has it."""
    fake = FakeObjects()
    store = RunStore("ignored", objects=fake, retry=RetryPolicy(attempts=1))
    writer = store.writer()
    saved = [
        writer.commit(b"%d" % step, step=step, kind="base", parent=None, state_digest="", meta={})
        for step in (1, 2)
    ]
    writer.collect([1])
    key = "commits/0000000000.json"
    fake.blobs[key] = fake.blobs["commits/0000000001.json"]

    def before(operation: str, asked: str) -> None:
        if operation == "get" and asked == key:
            fake.blobs.pop(key, None)

    fake.before = before
    writer.undelete(saved[0])
    assert store.manifests() == saved[::-1]
    assert store.fetch(saved[0]) == [b"1"]


def test_undelete_beside_a_number_that_was_used_again() -> None:
    fake = FakeObjects()
    store = RunStore("ignored", objects=fake, retry=RetryPolicy(attempts=1))
    writer = store.writer()
    saved = [
        writer.commit(b"%d" % step, step=step, kind="base", parent=None, state_digest="", meta={})
        for step in (1, 2)
    ]
    writer.collect([1])
    fake.blobs["commits/0000000000.json"] = fake.blobs["commits/0000000001.json"]
    writer.undelete(saved[0])
    del fake.blobs["commits/0000000000.json"]
    assert store.manifests() == saved[::-1]
