import contextlib
import os
import sys
import sysconfig
import threading
import warnings

import pytest
from support.fake_objects import FakeObjects, InjectedError
from support.training import TinyMLP

from shrinkpoint.engine.under_way import SaveUnderWay
from shrinkpoint.errors import ShrinkpointWarning
from shrinkpoint.saver import Saver, SaverConfig
from shrinkpoint.store.objects import TransientStoreError
from shrinkpoint.warn import warn


def in_background(work):
    """What the work raised in a thread of its own."""
    raised = []

    def run():
        try:
            work()
        except BaseException as error:  # noqa: BLE001
            raised.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return raised


@pytest.fixture
def strict(warned_in_background):
    """The warnings that are shown where all of them are errors."""
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("error")
        yield shown
    assert [warning.message for warning in shown] == warned_in_background
    warned_in_background.clear()


@pytest.fixture
def saver(monkeypatch):
    objects = FakeObjects()
    monkeypatch.setattr("shrinkpoint.store.run.open_objects", lambda url, options, **several: objects)
    saver = Saver("fake://run", SaverConfig(scheme="lossless"))
    saver.objects = objects
    yield saver
    saver.close()


def save(saver, step):
    saver.save({"model": TinyMLP().state_dict()}, step=step, wait=True)


def test_it_warns_of_the_line_outside_the_package():
    def train():
        SaveUnderWay().skip()

    with pytest.warns(ShrinkpointWarning, match="a save is skipped") as told:
        train()
    (warning,) = told
    assert (warning.filename, warning.lineno) == (__file__, train.__code__.co_firstlineno + 1)


def test_in_a_thread_of_the_package_it_warns_of_the_line_that_does():
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        thread = threading.Thread(target=SaveUnderWay().skip)
        thread.start()
        thread.join()
    (warning,) = told
    assert warning.filename.endswith("under_way.py")


def test_a_save_in_the_background_warns_of_the_users_line(tmp_path):
    saver = Saver(tmp_path / "first", SaverConfig(scheme="lossless"))
    save(saver, 1)
    saver.close()
    other = Saver(tmp_path / "first", SaverConfig(scheme="lossless"))
    with pytest.warns(ShrinkpointWarning, match="that this training does not continue") as told:
        other.save({"model": TinyMLP().state_dict()}, step=2, wait=True)
    line = sys._getframe().f_lineno - 1
    assert [(one.filename, one.lineno) for one in told] == [(__file__, line)]
    other.close()


def test_what_the_standard_library_calls_warns_of_the_users_line():
    def skips():
        SaveUnderWay().skip()
        yield

    with pytest.warns(ShrinkpointWarning) as told, contextlib.contextmanager(skips)():
        pass
    assert told[0].filename == __file__
    namespace = {"__name__": "outside"}
    library = os.path.join(sysconfig.get_path("purelib"), "framework.py")
    exec(compile("def call(f):\n    f()\n", library, "exec"), namespace)
    with pytest.warns(ShrinkpointWarning) as told:
        namespace["call"](SaveUnderWay().skip)
    assert (told[0].filename, told[0].lineno) == (__file__, sys._getframe().f_lineno - 1)


def test_a_filter_that_makes_it_an_error_is_obeyed_in_the_main_thread(strict):
    with pytest.raises(ShrinkpointWarning, match="the disk is slow"):
        warn("the disk is slow")
    assert not strict


def test_elsewhere_it_is_shown_and_not_raised(strict):
    assert in_background(lambda: warn("the disk is slow")) == []
    assert [str(warning.message) for warning in strict] == ["the disk is slow"]
    assert [warning.category for warning in strict] == [ShrinkpointWarning]


def test_a_filter_that_ignores_it_is_obeyed_everywhere():
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("ignore")
        assert in_background(lambda: warn("the disk is slow")) == []
        warn("the disk is slow")
    assert not shown


def test_a_save_that_needs_several_attempts_is_stored_where_warnings_are_errors(saver, strict):
    failures = iter(range(3))

    def fails(operation, key):
        if operation.startswith("put") and next(failures, None) is not None:
            raise TransientStoreError("503 Slow Down")

    saver.objects.before = fails
    save(saver, 1)
    assert [report.step for report in saver.reports()] == [1]
    assert any("trying again" in str(warning.message) for warning in strict)


def test_a_failed_save_is_told_and_the_next_one_works_where_warnings_are_errors(saver, strict):
    def fails(operation, key):
        raise InjectedError("no space left on device")

    saver.objects.before = fails
    save(saver, 1)
    saver.objects.heal()
    save(saver, 2)
    assert [report.step for report in saver.reports()] == [2]
    assert ["saving step 1" in str(warning.message) for warning in strict] == [True]
    assert saver.restore().manifest.step == 2
