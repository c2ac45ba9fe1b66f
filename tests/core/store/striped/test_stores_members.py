"""Which stores are a set: blank, exchanged, foreign and double ones are refused, and a killed beginning is completed."""

import json
import threading
import warnings
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.newest import newest_sound
from support.stores import QUICK, NamedFake, Stores, take

from shrinkpoint.errors import ConfigError, FormatError, RunMismatchError, ShrinkpointWarning, StoreError
from shrinkpoint.store.keys import MEMBER_KEY
from shrinkpoint.store.local import LocalObjects
from shrinkpoint.store.manifest import seal
from shrinkpoint.store.retry import RetryPolicy
from shrinkpoint.store.run import RunStore
from shrinkpoint.store.striped.members import Member, read_member
from shrinkpoint.store.striped.objects import StripedObjects


def with_a_checkpoint(count: int = 3, parity: int | None = 1) -> Stores:
    stores = Stores(count, parity)
    stores.run().writer().commit(b"1", step=1, kind="base", parent=None, state_digest="", meta={})
    return stores


def reads(stores: Stores) -> Any:
    found = newest_sound(stores.run(), take)
    return found and found[0].step


@pytest.mark.parametrize(
    ("count", "parity", "message"),
    [
        (1, 1, "2 to 32"),
        (33, 1, "2 to 32"),
        (2, 2, "at most 1"),
        (3, 3, "0, 1 or 2"),
        (3, -1, "0, 1 or 2"),
        (3, True, "0, 1 or 2"),
    ],
)
def test_numbers_that_cannot_work(count: int, parity: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        StripedObjects([NamedFake(str(i)) for i in range(count)], parity=parity)


def test_nothing_is_written_by_looking() -> None:
    stores = Stores()
    run = stores.run()
    assert not run.exists()
    assert newest_sound(run, take) is None
    assert run.manifests() == []
    assert [each.blobs for each in stores.each] == [{}, {}, {}]


def test_blank_store_is_left_out_and_not_written_to() -> None:
    for victim in range(3):
        stores = with_a_checkpoint()
        stores.each[victim].blobs.clear()
        with pytest.warns(ShrinkpointWarning, match=rf"store {victim + 1} .*is blank.*heal"):
            writer = stores.run().writer()
        writer.commit(b"2", step=2, kind="base", parent=None, state_digest="", meta={})
        assert stores.each[victim].blobs == {}


def test_blank_while_running() -> None:
    stores = with_a_checkpoint()
    run = stores.run()
    writer = run.writer()
    stores.each[1].blobs.clear()
    with pytest.warns(ShrinkpointWarning, match="is blank"):
        writer.commit(b"2", step=2, kind="base", parent=None, state_digest="", meta={})
    assert stores.each[1].blobs == {}


def test_blank_stores_do_not_count_as_asked() -> None:
    stores = with_a_checkpoint()
    for victim in (0, 1):
        stores.each[victim].blobs.clear()
    with pytest.raises(StoreError, match=r"2 are needed .*store 1 .*blank.*store 2 .*blank"):
        reads(stores)


def test_all_blank_is_a_new_run() -> None:
    stores = with_a_checkpoint()
    for each in stores.each:
        each.blobs.clear()
    assert reads(stores) is None


def test_exchanged() -> None:
    stores = with_a_checkpoint()
    stores.each[0], stores.each[1] = stores.each[1], stores.each[0]
    with pytest.raises(RunMismatchError, match="exchanged"):
        reads(stores)


def test_foreign() -> None:
    stores, others = with_a_checkpoint(), with_a_checkpoint()
    stores.each[1] = others.each[1]
    with pytest.raises(RunMismatchError, match="another set"):
        reads(stores)


def test_foreign_while_running_is_left_out() -> None:
    stores, others = with_a_checkpoint(), with_a_checkpoint()
    writer = stores.run().writer()
    before = dict(others.each[1].blobs)
    stores.each[1].blobs = others.each[1].blobs
    with pytest.warns(ShrinkpointWarning, match="another set"):
        writer.commit(b"2", step=2, kind="base", parent=None, state_digest="", meta={})
    assert others.each[1].blobs == before


def test_the_same_place_twice(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "a")
    places = [str(tmp_path / name) for name in ("a", "link", "b")]
    (tmp_path / "a").mkdir()
    objects = StripedObjects([LocalObjects(place) for place in places])
    with pytest.raises(RunMismatchError, match="same place"):
        RunStore("ignored", objects=objects).writer()


def test_a_copy_of_a_store() -> None:
    stores = with_a_checkpoint()
    stores.each[2].blobs = dict(stores.each[1].blobs)
    with pytest.raises(RunMismatchError, match=r"fake://b.*copy"):
        reads(stores)


@pytest.mark.parametrize(("count", "message"), [(2, "set of 3"), (4, "set of 3")])
def test_another_number_of_stores(count: int, message: str) -> None:
    stores = with_a_checkpoint()
    stores.each = [*stores.each, NamedFake("d")][:count]
    with pytest.raises(RunMismatchError, match=message):
        reads(stores)


def test_another_parity() -> None:
    stores = with_a_checkpoint()
    stores.parity = 2
    with pytest.raises(ConfigError, match="founded with parity=1"):
        reads(stores)
    stores.parity = None
    assert reads(stores) == 1


def test_parity_is_taken_from_the_set() -> None:
    stores = with_a_checkpoint(4, 2)
    stores.parity = None
    objects = stores.objects()
    assert objects.group.member is not None
    assert objects.group.redundancy == 2


def test_a_run_of_its_own_is_not_taken_over() -> None:
    stores = Stores()
    RunStore("ignored", objects=stores.each[1]).writer()
    before = dict(stores.each[1].blobs)
    with pytest.raises(RunMismatchError, match=r"fake://b holds a run of its own"):
        stores.run().writer()
    assert stores.each[1].blobs == before
    assert stores.each[0].blobs == stores.each[2].blobs == {}


def test_foreign_files_are_not_built_upon() -> None:
    stores = Stores()
    stores.each[2].put("notes.txt", b"mine")
    with pytest.raises(RunMismatchError, match="notes"):
        stores.run().writer()


@pytest.mark.parametrize("at", range(12))
def test_killed_while_a_run_begins(at: int) -> None:
    stores = Stores()
    remaining = [at]

    def before(operation: str, key: str) -> None:
        if operation.startswith("put"):
            remaining[0] -= 1
        if remaining[0] < 0:
            raise SystemExit

    for each in stores.each:
        each.before = before
    with suppress(SystemExit):
        stores.run().writer()
    for each in stores.each:
        each.heal()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        stores.run().writer().commit(b"1", step=1, kind="base", parent=None, state_digest="", meta={})
        assert reads(stores) == 1
        assert stores.objects().group.redundancy == 1
    assert all(MEMBER_KEY in each.blobs for each in stores.each)


def test_a_run_does_not_begin_with_a_store_down() -> None:
    stores = Stores()
    stores.each[1].lose()
    with pytest.raises(StoreError, match=r"all must answer when a run begins.*b is gone"):
        stores.run().writer()
    assert stores.each[0].blobs == {}


def test_two_founders_agree() -> None:
    stores = Stores()
    first, second = stores.objects(), stores.objects()
    assert first.group.member is None
    assert second.group.member is None
    assert first.group.found() == second.group.found()


def test_a_look_that_began_before_the_founding_forgets_nothing() -> None:
    stores = Stores()
    objects = stores.objects()
    at_once = threading.Event()

    def before(operation: str, key: str) -> None:
        if operation == "list" and not at_once.is_set():  # of the survey, which has found the stores blank
            at_once.set()
            stores.each[0].heal()
            objects.group.found()

    stores.each[0].before = before
    assert objects.group.member is not None
    objects.put_if_absent("format.json", b"1")


def test_one_member_alone_is_not_a_run() -> None:
    stores = with_a_checkpoint()
    run = RunStore("ignored", objects=stores.each[0], retry=RetryPolicy(attempts=1))
    before = dict(stores.each[0].blobs)
    with pytest.raises(RunMismatchError, match=r"store 1 of .*fake://a, fake://b, fake://c"):
        run.writer()
    with pytest.raises(RunMismatchError, match="store 1 of"):
        newest_sound(run, take)
    assert stores.each[0].blobs == before


GOOD = {
    "type": "shrinkpoint-member",
    "format": 1,
    "set": "0" * 32,
    "number": 1,
    "of": 3,
    "parity": 1,
    "stores": ["a", "b", "c"],
}


@pytest.mark.parametrize(
    "change",
    [
        {"number": 0},
        {"number": 4},
        {"number": 10**18},
        {"of": 10**18},
        {"of": 1, "stores": ["a"]},
        {"parity": 3},
        {"parity": -1},
        {"parity": True},
        {"set": "x"},
        {"set": 5},
        {"set": None},
        {"stores": ["a"]},
        {"stores": "abc"},
        {"stores": [1, 2, 3]},
        {"stores": ["a", "b", "c" * 10000]},
        {"type": "other"},
        {"format": 2},
        {"format": []},
    ],
    ids=str,
)
def test_hostile_member(change: dict[str, Any]) -> None:
    with pytest.raises(FormatError):
        Member.from_bytes(seal({**GOOD, **change}), "member.json")
    stores = with_a_checkpoint()
    stores.each[2].blobs[MEMBER_KEY] = seal({**GOOD, **change}), 0.0
    with pytest.warns(ShrinkpointWarning, match=r"store 3 .*member\.json"):
        assert reads(stores) == 1


@pytest.mark.parametrize("content", [b"", b"{", b"[" * 10000, b"\0" * 10**6, json.dumps(GOOD).encode()])
def test_damaged_member_leaves_one_store_out(content: bytes) -> None:
    stores = with_a_checkpoint()
    stores.each[0].blobs[MEMBER_KEY] = content, 0.0
    with pytest.warns(ShrinkpointWarning, match="store 1"):
        assert reads(stores) == 1


def test_good_member_comes_back() -> None:
    member = Member.from_bytes(seal(GOOD), "member.json")
    assert Member.from_bytes(replace(member, number=2).to_bytes(), "").number == 2
    store = NamedFake("a")
    assert read_member(store) is None
    assert QUICK.limit_s > QUICK.alone_s


@pytest.mark.parametrize("exchanged", [0, 2])
def test_a_disk_that_is_unmounted_before_the_manifest_takes_nothing(
    tmp_path: Path, exchanged: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The empty folder in its place is none of the set."""
    folders = [tmp_path / name for name in "abc"]
    store = RunStore(folders)
    writer = store.writer()
    writer.commit(b"1", step=1, kind="base", parent=None, state_digest="", meta={})
    mount, put = folders[exchanged], StripedObjects.put

    def unmount(self: StripedObjects, key: str, data: bytes) -> None:
        put(self, key, data)
        mount.rename(mount.with_suffix(".away"))
        mount.mkdir()

    monkeypatch.setattr(StripedObjects, "put", unmount)
    second = writer.commit(b"2", step=2, kind="base", parent=None, state_digest="", meta={})
    assert list(mount.rglob("*.json")) == []
    assert RunStore(folders).manifests()[0] == second
    assert store.redundancy == 0
