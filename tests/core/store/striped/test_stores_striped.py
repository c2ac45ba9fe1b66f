"""Several stores as one: what is acknowledged outlives the loss of as many stores as parity says, or it is an error."""

import itertools
import os
import pickle
import time
import warnings
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from support.fake_objects import InjectedError
from support.newest import newest_sound
from support.stores import NamedFake, Stores, take

from shrinkpoint.errors import (
    ChainError,
    CorruptionError,
    FencedError,
    ShrinkpointWarning,
    StoreError,
)
from shrinkpoint.store.keys import commit_key
from shrinkpoint.store.local import LocalObjects
from shrinkpoint.store.manifest import Manifest, seal
from shrinkpoint.store.objects import MissingKeyError
from shrinkpoint.store.striped.blobs import MIRROR_BELOW, choose_geometry
from shrinkpoint.store.striped.members import Quorum
from shrinkpoint.store.striped.objects import StripedObjects
from shrinkpoint.store.striped.shards import BLOCK, Geometry
from shrinkpoint.store.writer import RunWriter

BIG = os.urandom(3 * MIRROR_BELOW + 11)
KEY = "data/000000000001-0123456789abcdef-0123456789abcdef.shrink"


def base(writer: RunWriter, step: int, data: bytes = BIG) -> Manifest:
    return writer.commit(data, step=step, kind="base", parent=None, state_digest="", meta={})


def newest(stores: Stores, **how: Any) -> tuple[int, list[bytes]] | None:
    found = newest_sound(stores.run(stores.objects(**how)), take)
    return None if found is None else (found[0].step, found[1])


@pytest.fixture(autouse=True)
def _told() -> Any:
    """That a store fails is told; most of these tests make one fail."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ShrinkpointWarning)
        yield


# ---- numbers


@pytest.mark.parametrize(
    ("count", "parity", "write", "read"),
    [
        (2, 0, 2, 1),
        (2, 1, 2, 1),
        (3, 1, 2, 2),
        (3, 2, 3, 1),
        (4, 1, 3, 2),
        (4, 2, 3, 2),
        (5, 2, 3, 3),
        (32, 2, 17, 16),
    ],
)
def test_quorums_meet(count: int, parity: int, write: int, read: int) -> None:
    quorum = Quorum(count, parity)
    assert (quorum.write, quorum.read) == (write, read)
    assert write + read > count  # whatever was committed is seen
    assert 2 * write > count  # two records cannot both be
    assert count - parity >= read  # after the losses there are enough to ask
    assert write - parity >= 1  # and one of them has it


def test_geometry_never_has_less_parity() -> None:
    for parity, stores in itertools.product((0, 1, 2), range(1, 9)):
        if stores <= parity:
            continue
        cut = choose_geometry(stores, parity, MIRROR_BELOW)
        assert (cut.shards, cut.spare) == (stores, parity)
        assert choose_geometry(stores, parity, MIRROR_BELOW - 1).spare >= parity


# ---- losses


@pytest.mark.parametrize(("count", "parity"), [(2, 1), (3, 1), (4, 1), (3, 2), (4, 2), (5, 2)])
@pytest.mark.parametrize("size", [len(BIG), 100], ids=["cut", "mirrored"])
def test_any_so_many_stores_may_be_lost(count: int, parity: int, size: int) -> None:
    stores = Stores(count, parity)
    writer = stores.run().writer()
    for step in (1, 2):
        base(writer, step, BIG[:size])
    for lost in itertools.combinations(range(count), parity):
        for store in lost:
            stores.each[store].lose()
        assert newest(stores) == (2, [BIG[:size]])
        for store in lost:
            stores.each[store].heal()


@pytest.mark.parametrize("lost", [0, 1, 2])
def test_saving_goes_on_with_the_same_redundancy(lost: int) -> None:
    stores = Stores()
    run = stores.run()
    writer = run.writer()
    base(writer, 1)
    stores.each[lost].lose()
    base(writer, 2)
    stores.each[lost].heal()
    there = [
        name.geometry for i in range(3) if i != lost for name in stores.shards(i) if "000002" in name.key
    ]
    assert {(cut.k, cut.spare) for cut in there} >= {(1, 1)}
    # back with what it had, and now another one goes: what was written meanwhile is on two of the others
    for other in {0, 1, 2} - {lost}:
        stores.each[other].lose()
        assert newest(stores) == (2, [BIG])
        stores.each[other].heal()


def test_failure_at_every_operation_of_one_store() -> None:
    """However far it gets, the commit is acknowledged, and read with any other store gone."""
    for at in range(40):
        stores = Stores()
        writer = stores.run().writer()
        base(writer, 1)
        before = len(stores.each[1].calls)
        stores.each[1].fail_at(at)
        base(writer, 2)
        base(writer, 3)
        stores.each[1].heal()
        assert newest(stores) == (3, [BIG])
        for other in range(3):
            stores.each[other].lose()
            assert newest(stores) == (3, [BIG])
            stores.each[other].heal()
        if len(stores.each[1].calls) - before <= at:
            return
    raise AssertionError("a commit takes fewer operations")


def test_too_few_is_an_error_and_never_a_step_back() -> None:
    stores = Stores()
    writer = stores.run().writer()
    base(writer, 1)
    for store in (0, 2):
        stores.each[store].lose()
    with pytest.raises(StoreError, match=r"1 of 3 stores can be read, and 2 .*a is gone.*c is gone"):
        newest(stores)
    with pytest.raises(StoreError, match=r"could be written to, and 2 are needed"):
        base(writer, 2)
    with pytest.raises(StoreError):
        stores.run().exists()
    stores.each[0].heal()
    base(writer, 3)
    assert newest(stores) == (3, [BIG])


def test_shards_that_do_not_answer_are_no_reason_to_go_back() -> None:
    """Five stores: records need three, a blob of 4+1 needs four."""
    stores = Stores(5, 1)
    writer = stores.run().writer()
    base(writer, 1, b"small")
    base(writer, 2)
    for store in (0, 1):
        stores.each[store].lose()
    with pytest.raises(StoreError, match="3 of the 4 shards"):
        newest(stores)
    assert newest(stores, read_anyway=True) == (1, [b"small"])


def test_a_blank_store_is_no_witness_that_shards_are_missing() -> None:
    stores = Stores(3, 0)
    base(stores.run().writer(), 1)
    stores.each[1].blobs.clear()
    with pytest.raises(StoreError, match=r"2 of the 3 shards .* does not answer.*is blank"):
        newest(stores)


def test_in_a_disaster_what_is_left_is_read() -> None:
    stores = Stores(3, 1)
    writer = stores.run().writer()
    base(writer, 1, b"small")
    for store in (0, 1):
        stores.each[store].lose()
    assert newest(stores, read_anyway=True) == (1, [b"small"])


def test_stale_store_returns() -> None:
    stores = Stores()
    writer = stores.run().writer()
    base(writer, 1)
    before = dict(stores.each[2].blobs)
    first = base(writer, 2)
    base(writer, 3)
    writer.collect(keep=[first.seq + 1], grace_s=0)
    stores.each[2].blobs = before
    assert newest(stores) == (3, [BIG])
    for lost in (
        0,
        1,
    ):  # what it has lost and another store are two losses: an error, and no step back to what it holds
        stores.each[lost].lose()
        with pytest.raises(StoreError, match="1 of the 2 shards"):
            newest(stores)
        stores.each[lost].heal()
    assert stores.run().writer().epoch == writer.epoch + 1


def test_a_store_that_hangs_holds_up_nothing() -> None:
    stores = Stores()
    writer = stores.run().writer()
    base(writer, 1)
    for operation in ("put", "put_if_absent", "get", "list"):
        release = stores.each[1].hang([operation])
        began = time.monotonic()
        base(writer, 2)
        assert newest(stores) == (2, [BIG])
        assert time.monotonic() - began < 15
        release.set()
        stores.each[1].heal()


def test_told_once_and_redundancy() -> None:
    stores = Stores()
    objects = stores.objects()
    run = stores.run(objects)
    writer = run.writer()
    base(writer, 1)
    assert objects.group.redundancy == 1
    stores.each[0].lose()
    with pytest.warns(ShrinkpointWarning, match=r"store 1 \(fake://a\): .*gone.*no other store may be lost"):
        base(writer, 2)
    assert objects.group.redundancy == 0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        base(writer, 3)


# ---- damage


def test_damaged_shards_are_rebuilt() -> None:
    for victim in range(3):
        stores = Stores()
        base(stores.run().writer(), 1)
        for name in stores.shards(victim):
            stores.damage(victim, str(name), name.geometry.header_bytes + 5)
        assert newest(stores) == (1, [BIG])


def test_damage_in_several_shards_but_different_blocks() -> None:
    stores = Stores()
    data = os.urandom(6 * BLOCK)
    objects = stores.objects()
    objects.put(KEY, data)
    for store in range(3):
        [name] = stores.shards(store)
        stores.damage(store, str(name), name.geometry.header_bytes + store * BLOCK + 7)
    assert objects.get(KEY, max_size=len(data)) == data
    assert objects.get(KEY, 5, 2 * BLOCK, max_size=len(data)) == data[5 : 2 * BLOCK]


def test_damage_beyond_repair_is_noticed() -> None:
    stores = Stores()
    base(stores.run().writer(), 1)
    for store in (0, 1):
        for name in stores.shards(store):
            stores.damage(store, str(name), name.geometry.header_bytes)
    with pytest.raises(ChainError, match=r"damaged: fake://"):
        newest(stores)


def test_damaged_records_are_outvoted_by_their_seal() -> None:
    stores = Stores()
    base(stores.run().writer(), 1)
    for store in (0, 2):  # two copies with the same damage, of three
        for key in ("format.json", "commits/0000000000.json"):
            stores.damage(store, key, 20)
    assert newest(stores) == (1, [BIG])
    assert stores.run().exists()


def test_junk_shards_cost_nothing() -> None:
    stores = Stores()
    base(stores.run().writer(), 1)
    [name] = stores.shards(0)
    for suffix in ("2+1.0.1000000000000000000", "0+1.0.5", "1+30.7.5", "2+1.9.5"):
        stores.each[0].blobs[f"{name.key}.{suffix}"] = b"junk", 0.0
    assert newest(stores) == (1, [BIG])
    assert (name.key, len(BIG)) in [(info.key, info.size) for info in stores.objects().list("data/")]
    writer = stores.run().writer()
    assert writer.collect(keep=[0], grace_s=0).blobs_removed == ()


def test_longer_than_its_manifest_says() -> None:
    stores = Stores()
    objects = stores.objects()
    objects.put(KEY, BIG)
    with pytest.raises(CorruptionError):
        objects.get(KEY, max_size=len(BIG) - 1)


def test_blob_without_enough_shards_is_listed_as_incomplete() -> None:
    stores = Stores()
    objects = stores.objects()
    objects.put(KEY, BIG)
    for store in (0, 1):
        stores.each[store].delete([str(name) for name in stores.shards(store)])
    [info] = stores.objects().list("data/")
    assert info.size < len(BIG)
    with pytest.raises(MissingKeyError, match="1 of the 2 shards"):
        stores.objects().get(KEY, max_size=len(BIG))


# ---- what is read


def reads(stores: Stores) -> list[tuple[int, str]]:
    return [
        (i, key)
        for i, each in enumerate(stores.each)
        for operation, key in each.calls
        if operation == "get" and "shrink" in key
    ]


def forget_calls(stores: Stores) -> None:
    for each in stores.each:
        each.calls.clear()


def test_range_touches_the_shards_that_it_needs() -> None:
    stores = Stores(5, 2)
    data = os.urandom(9 * BLOCK)
    objects = stores.objects()
    objects.put(KEY, data)
    size = Geometry(3, 2, len(data)).shard_bytes
    for start, end, places in [
        (10, 20, {0}),
        (size + 5, size + 6, {1}),
        (size - 1, size + 1, {0, 1}),
        (0, len(data), {0, 1, 2}),
    ]:
        forget_calls(stores)
        assert objects.get(KEY, start, end, max_size=len(data)) == data[start:end]
        assert {int(key.split(".")[-2]) for _, key in reads(stores)} == places


def test_parity_is_read_at_once_where_a_store_fails() -> None:
    stores = Stores()
    objects = stores.objects()
    objects.put(KEY, BIG)
    victim = next(i for i in range(3) if stores.shards(i)[0].place == 0)
    objects.group.health.failed(victim, "ill")
    forget_calls(stores)
    assert objects.get(KEY, max_size=len(BIG)) == BIG
    assert {store for store, _ in reads(stores)} == {0, 1, 2} - {victim}


@pytest.mark.parametrize("parity", [1, 2])
def test_every_range_with_every_loss(parity: int) -> None:
    stores = Stores(4, parity)
    data = os.urandom(2 * MIRROR_BELOW + 3)
    stores.objects().put(KEY, data)
    edges = [0, 1, 7, 8, MIRROR_BELOW, len(data) // 2, len(data) - 1, len(data)]
    for lost in itertools.combinations(range(4), parity):
        for store in lost:
            stores.each[store].lose()
        objects = stores.objects()
        for start, end in itertools.combinations_with_replacement(edges, 2):
            assert objects.get(KEY, start, end, max_size=len(data)) == data[start:end]
        for store in lost:
            stores.each[store].heal()


# ---- one number, several records


def sealed(**fields: Any) -> bytes:
    return seal({"type": "test", **fields})


def test_a_minority_is_never_taken_for_a_success() -> None:
    """Three writers that each see another first store: all have a copy, none a majority."""
    stores = Stores()
    stores.objects().put("probe/0123456789abcdef", b"")
    key = commit_key(0)
    others = [sealed(n=i) for i in range(2)]
    stores.each[1].put_if_absent(key, others[0])
    stores.each[2].put_if_absent(key, others[1])
    objects, mine = stores.objects(), sealed(n=9)
    assert not objects.put_if_absent(key, mine)
    assert objects.get(key, max_size=1000) in others
    assert len(stores.objects().list("commits/")) == 3


def test_versions_have_stable_names_and_are_removed_one_by_one() -> None:
    stores = Stores()
    stores.objects().put("probe/0123456789abcdef", b"")
    key, first, second = commit_key(3), sealed(n=1), sealed(n=2)
    stores.each[0].put_if_absent(key, first)
    for store in (1, 2):
        stores.each[store].put_if_absent(key, second)
    objects = stores.objects()
    names = {objects.get(info.key, max_size=1000): info.key for info in objects.list("commits/")}
    assert set(names) == {first, second}
    assert {stores.objects().get(name, max_size=1000) for name in names.values()} == {first, second}
    for name in names.values():
        assert [info.key for info in stores.objects().list(name)] == [name]
    objects.delete([names[second]])
    assert [objects.get(info.key, max_size=1000) for info in objects.list("commits/")] == [first]
    with pytest.raises(MissingKeyError):
        stores.objects().get(names[second], max_size=1000)


def test_a_commit_that_failed_half_is_older_than_the_next() -> None:
    """The first manifest reaches one store and is an error; the second is acknowledged by the other two."""
    stores = Stores()
    objects = stores.objects()
    writer = stores.run(objects).writer()
    first = stores.each[0]
    for each in stores.each[1:]:
        each.before = lambda operation, key: _refuse(operation == "put_if_absent")
    with pytest.raises(StoreError):
        base(writer, 1)
    for each in stores.each[1:]:
        each.heal()
    first.lose()
    objects.group.health.failed(0, "lost")
    base(writer, 2)
    first.heal()
    assert newest(stores) == (2, [BIG])
    assert [m.step for m in stores.run().manifests()] == [2, 1]


def _refuse(really: bool) -> None:
    if really:
        raise InjectedError("refused")


def test_a_record_that_is_longer_than_ours_is_another_one() -> None:
    stores = Stores()
    objects = stores.objects()
    assert objects.put_if_absent(commit_key(0), b"long" * 1000)
    assert not stores.objects().put_if_absent(commit_key(0), b"short")


def test_lost_response_of_one_store() -> None:
    stores = Stores()
    objects = stores.objects()
    objects.put("probe/0123456789abcdef", b"")
    stores.each[0].lose_response_of = "commits/"
    assert objects.put_if_absent(commit_key(0), b"mine")
    assert stores.objects().put_if_absent(commit_key(0), b"mine")
    assert not stores.objects().put_if_absent(commit_key(0), b"another")


def test_old_writer_is_fenced_whichever_store_is_gone() -> None:
    for lost in (None, 0, 1, 2):
        stores = Stores()
        old = stores.run().writer()
        base(old, 1, b"old")
        new = stores.run().writer()
        if lost is not None:
            stores.each[lost].lose()
        base(new, 2, b"new")
        with pytest.raises(FencedError):
            base(old, 3, b"old")
        assert newest(stores) == (2, [b"new"])


@pytest.mark.parametrize("views", ["all live", "one dead", "dead for some"])
@pytest.mark.parametrize(
    "rounds", [100, pytest.param(2000, marks=[pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(3600)])]
)
def test_race_of_eight_writers_has_one_winner(views: str, rounds: int, tmp_path: Any) -> None:
    roots = [str(tmp_path / str(i)) for i in range(3)]
    writers = [StripedObjects([LocalObjects(root) for root in roots]) for _ in range(8)]
    writers[0].put("probe/0123456789abcdef", b"")
    wins = []
    with ThreadPoolExecutor(8) as pool:
        for number in range(rounds):
            for j, writer in enumerate(writers):
                assert writer.group.member is not None
                if views == "one dead" or (views == "dead for some" and j % 2):
                    writer.group.health.failed(0, "dead for this writer")

            def race(writer: StripedObjects, number: int = number) -> bool:
                data = sealed(writer=id(writer))
                try:
                    if writer.put_if_absent(commit_key(number), data):
                        return True
                except StoreError:
                    return False
                return writer.get(commit_key(number), max_size=1000) == data  # as the run store asks

            wins.append(sum(pool.map(race, writers)))
    counts = Counter(wins)
    print(f"{views}, {rounds} rounds: {dict(counts)} winners")
    # Where writers differ in which stores they see, each of two may have a minority: nobody has won, and both go on.
    assert set(counts) <= ({0, 1} if views == "dead for some" else {1})
    assert counts[1] > rounds // 2


# ---- clocks, conditions, listings


def test_a_clock_that_is_a_day_off_never_makes_anything_older() -> None:
    stores = Stores()
    for each, offset in zip(stores.each, (0.0, 86400.0, -86400.0), strict=True):
        each.now += offset
    objects = stores.objects()
    objects.put(KEY, BIG)
    [info] = objects.list("data/")
    assert info.modified is not None
    assert objects.server_time() - info.modified <= 0
    writer = stores.run().writer()
    base(writer, 1)
    base(writer, 2)
    report = writer.collect(keep=[1])
    assert report.blobs_removed == ()
    for each in stores.each:
        each.now += 3.1 * 86400
    assert len(writer.collect(keep=[1]).blobs_removed) == 2


def test_one_that_ignores_put_if_absent_makes_it_a_single_writers() -> None:
    stores = Stores()
    stores.each[2] = NamedFake("c", honours_condition=False, known_atomic=False)
    with pytest.warns(ShrinkpointWarning, match="does not honour put-if-absent"):
        writer = stores.run().writer()
    assert writer.mode == "single-writer"
    base(writer, 1)
    assert newest(stores) == (1, [BIG])


def test_one_that_ignores_put_if_absent_and_comes_later_is_left_out() -> None:
    stores = Stores()
    writer = stores.run().writer()
    base(writer, 1)
    stores.each[2].lose()
    later = stores.objects()
    second = stores.run(later).writer()
    stores.each[2].heal()
    stores.each[2].create_is_atomic = None
    stores.each[2].honours_condition = False
    later.group.health.answered(2)
    base(second, 2)
    assert "does not honour" in (later.group.health.why(2) or "")
    assert commit_key(1) not in stores.each[2].blobs
    with pytest.raises(FencedError):
        base(writer, 3)


def test_a_listing_that_lags_hides_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    stores = Stores()
    writer = stores.run().writer()
    base(writer, 1)
    lagging = stores.each[1]
    old = lagging.list("")
    base(writer, 2)
    monkeypatch.setattr(
        lagging, "list", lambda prefix, limit=None: [i for i in old if i.key.startswith(prefix)]
    )
    assert newest(stores) == (2, [BIG])
    stores.each[0].lose()
    assert newest(stores) == (2, [BIG])


def test_everything_else_of_a_run_with_a_store_gone() -> None:
    """Pins, deltas, collection, undelete."""
    stores = Stores()
    writer = stores.run().writer()
    first = base(writer, 1)
    stores.each[1].lose()
    second = writer.commit(BIG[::-1], step=2, kind="delta", parent=first, state_digest="", meta={})
    writer.pin("keep", second)
    third = base(writer, 3)
    assert writer.collect(keep=[third.seq], grace_s=3600).removed == (first.seq,)
    stores.each[1].heal()
    run = stores.run()
    assert run.pins() == {"keep": second.seq}
    [gone] = [m for m in run.removed() if m.step == 1] or [first]
    stores.run().writer().undelete(gone)
    assert {m.step for m in stores.run().manifests()} == {1, 2, 3}
    assert stores.run().fetch(second) == [BIG, BIG[::-1]]


def test_what_an_absent_store_kept_is_deleted_by_the_next_collection() -> None:
    stores = Stores()
    objects = stores.objects()
    writer = stores.run(objects).writer()
    for step in (1, 2):
        base(writer, step)
    stores.each[2].lose()
    writer.collect(keep=[1], grace_s=0)
    stores.each[2].heal()
    objects.group.health.answered(2)
    assert [m.step for m in stores.run().manifests()] == [2, 1]
    for each in stores.each:
        each.now += 10
    writer.collect(keep=[1], grace_s=0)
    for each in stores.each:
        each.now += 10
    writer.collect(keep=[1], grace_s=0)
    assert [m.step for m in stores.run().manifests()] == [2]
    assert all(
        "-000001" not in key
        for each in stores.each
        for key in each.blobs
        if key.startswith("data/000000000001")
    )


def test_pickle_forgets_opinions() -> None:
    objects = StripedObjects([LocalObjects("/tmp/a"), LocalObjects("/tmp/b")], parity=1)
    objects.group.health.failed(0, "ill")
    assert pickle.loads(pickle.dumps(objects)).group.health.failing == []


def test_injected_errors_are_store_errors() -> None:
    assert issubclass(InjectedError, StoreError)
