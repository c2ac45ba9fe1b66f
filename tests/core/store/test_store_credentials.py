"""Credentials that end while a training goes on: they are asked for again, and until there are new ones training goes on unsaved."""

from typing import Any, ClassVar

import fsspec
import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem
from support.options import grouped

import shrinkpoint
from shrinkpoint.errors import SaveFailedError, ShrinkpointWarning, StoreError


class RefreshError(Exception):
    """As google.auth's."""


class Guarded(MemoryFileSystem):
    """A store in memory that lets in who has the token of the hour."""

    protocol = "guarded"
    store: ClassVar[dict[str, Any]] = {}
    pseudo_dirs: ClassVar[list[str]] = [""]
    valid = "morning"
    refusal: type[Exception] = RefreshError

    def __init__(self, token: str = "", **options: Any) -> None:
        super().__init__(**options)
        self.token = token

    def _require(self) -> None:
        if self.token != type(self).valid:
            raise self.refusal(f"the token {self.token!r} is not valid")

    def pipe_file(self, *args: Any, **options: Any) -> Any:
        self._require()
        return super().pipe_file(*args, **options)

    def cat_file(self, *args: Any, **options: Any) -> Any:
        self._require()
        return super().cat_file(*args, **options)

    def ls(self, *args: Any, **options: Any) -> Any:
        self._require()
        return super().ls(*args, **options)


@pytest.fixture(autouse=True)
def _guarded(monkeypatch: pytest.MonkeyPatch) -> None:
    fsspec.register_implementation("guarded", Guarded, clobber=True)
    monkeypatch.setattr(Guarded, "valid", "morning")
    monkeypatch.setattr(Guarded, "store", {})
    monkeypatch.setattr(Guarded, "pseudo_dirs", [""])


def _checkpointer(storage_options: Any, **options: Any) -> Any:
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return shrinkpoint.Checkpointer(
        "guarded://bucket/run",
        model,
        optimizer,
        **grouped(scheme="lossless", storage_options=storage_options, **options),
    )


@pytest.mark.parametrize("refusal", [RefreshError, PermissionError])
def test_a_function_is_asked_again_when_the_token_has_ended(
    monkeypatch: pytest.MonkeyPatch, refusal: type[Exception]
) -> None:
    monkeypatch.setattr(Guarded, "refusal", refusal)
    asked: list[str] = []

    def login() -> dict[str, str]:
        asked.append(Guarded.valid)
        return {"token": Guarded.valid}

    checkpointer = _checkpointer(login)
    checkpointer.save(1, wait=True)
    Guarded.valid = "evening"
    checkpointer.save(2, wait=True)
    checkpointer.close()
    assert set(asked) == {"morning", "evening"}
    assert _checkpointer(login).resume() == 2
    assert "weight" in shrinkpoint.load_weights("guarded://bucket/run#newest", storage_options=login)


def test_an_ended_token_ends_no_training() -> None:
    checkpointer = _checkpointer({"token": "morning"})
    checkpointer.save(1, wait=True)
    Guarded.valid = "evening"
    for step in range(2, 6):
        with pytest.warns(ShrinkpointWarning, match=f"step {step} .*do not count as failures"):
            checkpointer.save(step, wait=True)
    Guarded.valid = "morning"
    checkpointer.save(6, wait=True)
    assert [report.step for report in checkpointer.reports()] == [1, 6]
    checkpointer.close()


def test_a_login_that_fails_ends_no_training_either() -> None:
    def login() -> dict[str, str]:
        if Guarded.valid == "evening":
            raise OSError("the metadata service does not answer")
        return {"token": Guarded.valid}

    checkpointer = _checkpointer(login)
    checkpointer.save(1, wait=True)
    Guarded.valid = "evening"
    with pytest.warns(ShrinkpointWarning, match="metadata service"):
        checkpointer.save(2, wait=True)
    Guarded.valid = "morning"
    checkpointer.save(3, wait=True)
    checkpointer.close()


def test_other_failures_count(monkeypatch: pytest.MonkeyPatch) -> None:
    class DiskError(Exception):
        pass

    checkpointer = _checkpointer({"token": "morning"})
    checkpointer.save(1, wait=True)
    monkeypatch.setattr(Guarded, "refusal", DiskError)
    Guarded.valid = "evening"
    for _ in range(2):
        with pytest.warns(ShrinkpointWarning, match="in a row"):
            checkpointer.save(2, wait=True)
    with pytest.raises(SaveFailedError, match="the 3rd failure in a row"):
        checkpointer.save(2, wait=True)


def test_wrong_credentials_are_an_error_at_the_start() -> None:
    with pytest.raises(StoreError, match="is not valid"):
        _checkpointer({"token": "wrong"})
