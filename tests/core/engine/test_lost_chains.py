"""A run whose files are taken away while it is being saved: what is acknowledged afterwards can be restored."""

import shutil
import warnings
from pathlib import Path

import pytest
import torch
from support.containers import identical
from support.training import OPTIMIZERS, TinyMLP, train

from shrinkpoint.checkpointer import Checkpointer
from shrinkpoint.errors import ChainError, ShrinkpointWarning, StoreError
from shrinkpoint.saver import Saver
from shrinkpoint.store import catalog
from shrinkpoint.store.keys import COMMITTED_KEY
from shrinkpoint.store.local import LocalObjects


class Run:
    """A loop that saves each step."""

    def __init__(self, url: Path) -> None:
        torch.manual_seed(0)
        self.url, self.model, self.step = url, TinyMLP(), 0
        self.optimizer = OPTIMIZERS["AdamW"](self.model)
        self.checkpointer = Checkpointer(str(url), self.model, self.optimizer, scheme="lossless")

    def save(self, times: int = 1) -> None:
        for _ in range(times):
            train(self.model, self.optimizer, range(self.step, self.step + 1))
            self.step += 1
            self.checkpointer.save(self.step, wait=True)

    def kinds(self) -> list[str]:
        return [report.kind for report in self.checkpointer.reports()]

    def restored_weights(self, which: int | None = None) -> dict[str, torch.Tensor]:
        restored = Saver(str(self.url)).restore(which)
        assert restored is not None
        return dict(restored.state.to_object()["model"])


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path / "run")


def test_base_that_is_deleted_while_training_goes_on(run: Run) -> None:
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        run.save()
        (base,) = (run.url / "data").iterdir()
        base.unlink()
        run.save(3)
        run.checkpointer.close()
    assert run.kinds() == ["base", "base", "delta", "delta"]
    (said,) = [str(one.message) for one in told if one.category is ShrinkpointWarning]
    assert base.name in said
    assert "stored as a base" in said
    for step in (2, 3, 4):
        run.restored_weights(step)
    assert identical(run.restored_weights(), dict(run.model.state_dict()))
    with pytest.raises(ChainError):
        run.restored_weights(1)


def test_run_that_is_removed_while_training_goes_on(run: Run) -> None:
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        run.save(2)
        shutil.rmtree(run.url)
        run.save(2)
        run.checkpointer.close()
    assert run.kinds() == ["base", "delta", "base", "delta"]
    assert len([one for one in told if "stored as a base" in str(one.message)]) == 1
    assert identical(run.restored_weights(), dict(run.model.state_dict()))


def test_resume_of_a_run_whose_commits_are_gone_does_not_start_at_step_0(run: Run) -> None:
    run.save(2)
    run.checkpointer.close()
    commits = run.url / "commits"
    commits.rename(run.url.parent / "away")
    for policy in ("auto", "never", "must"):
        with pytest.raises(StoreError, match="lists no checkpoint"):
            Checkpointer(str(run.url), run.model, run.optimizer, resume=policy).resume()  # type: ignore[arg-type]
    (run.url.parent / "away").rename(commits)
    assert (
        Checkpointer(
            str(run.url),
            run.model,
            run.optimizer,
        ).resume()
        == 2
    )


def test_resume_where_all_listings_are_empty_does_not_start_at_step_0(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    run.save(2)
    run.checkpointer.close()
    (run.url / COMMITTED_KEY).unlink()
    with monkeypatch.context() as patch:
        patch.setattr(LocalObjects, "list", lambda objects, prefix, limit=None: [])
        with pytest.raises(StoreError, match="listings are not to be believed"):
            Checkpointer(str(run.url), run.model, run.optimizer, resume="auto").resume()
    assert (
        Checkpointer(
            str(run.url),
            run.model,
            run.optimizer,
        ).resume()
        == 2
    )


def test_resume_of_a_run_that_was_never_saved_is_told_of(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    run.checkpointer.close()
    monkeypatch.setattr(catalog, "_begun_here", set())  # as in another process
    again = Checkpointer(
        str(run.url),
        run.model,
        run.optimizer,
    )
    with pytest.warns(ShrinkpointWarning, match="was begun before .*starts afresh"):
        assert again.resume() == 0
    again.close()


def test_a_note_that_cannot_be_written_costs_no_checkpoint(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """A policy that allows the other folders of a run alone."""
    put = LocalObjects.put_if_absent

    def refuse(objects: LocalObjects, key: str, data: bytes) -> bool:
        if key == COMMITTED_KEY:
            raise StoreError(f"{key}: access denied")
        return put(objects, key, data)

    monkeypatch.setattr(LocalObjects, "put_if_absent", refuse)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        run.save(4)
    assert run.kinds() == ["base", "delta", "delta", "delta"]
    assert [str(each.message).count("access denied") for each in told] == [1]
    assert identical(run.restored_weights(), dict(run.model.state_dict()))
