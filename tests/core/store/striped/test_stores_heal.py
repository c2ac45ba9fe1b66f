"""What a set lacks is seen, told and written again; a store counts as healed when it holds everything, and not before."""

import os
import warnings
from typing import Any

import pytest
from support.fake_objects import InjectedError
from support.newest import newest_sound
from support.stores import NamedFake, Stores, take

from shrinkpoint.errors import RunMismatchError, ShrinkpointWarning, StoreError
from shrinkpoint.store.keys import MEMBER_KEY
from shrinkpoint.store.manifest import Manifest
from shrinkpoint.store.run import RunStore
from shrinkpoint.store.striped.heal import Healed, Survey, heal, survey
from shrinkpoint.store.striped.members import JOINING_KEY
from shrinkpoint.store.striped.shards import BLOCK

BIG = os.urandom(200_001)


@pytest.fixture(autouse=True)
def _told() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ShrinkpointWarning)
        yield


def saved(count: int = 3, parity: int = 1) -> Stores:
    """A base and a delta, a small base, and a pin."""
    stores = Stores(count, parity)
    writer = stores.run().writer()
    first = writer.commit(BIG, step=1, kind="base", parent=None, state_digest="", meta={})
    writer.commit(BIG[::-1], step=2, kind="delta", parent=first, state_digest="", meta={})
    writer.pin("keep", writer.commit(b"small", step=3, kind="base", parent=None, state_digest="", meta={}))
    return stores


def needed(run: RunStore) -> set[str]:
    return {ref.key for manifest in run.manifests() for ref in manifest.chain}


def healed(stores: Stores, **how: Any) -> Healed:
    objects = stores.objects()
    return heal(objects, needed(stores.run(objects)), **how)


def surveyed(stores: Stores) -> Survey:
    objects = stores.objects()
    run = stores.run(objects)
    return survey(objects, run.manifests(), needed(run))


def chains(stores: Stores) -> list[tuple[Manifest, list[bytes]]]:
    run = stores.run()
    return [(manifest, run.fetch(manifest)) for manifest in run.manifests()]


def test_nothing_to_do() -> None:
    stores = saved()
    before = [dict(each.blobs) for each in stores.each]
    done = healed(stores)
    assert (done.joined, done.records, done.shards, done.repaired, done.lost) == ((), 0, 0, 0, {})
    assert [each.blobs for each in stores.each] == before
    seen = surveyed(stores)
    assert seen.redundancy == 1
    assert [(s.problem, s.last_step, s.records_missing, s.shards_missing) for s in seen.stores] == [
        (None, 3, 0, 0)
    ] * 3


@pytest.mark.parametrize(("count", "parity"), [(2, 1), (3, 1), (4, 2), (5, 2)])
def test_blank_stores_are_filled_and_others_may_be_lost(count: int, parity: int) -> None:
    stores = saved(count, parity)
    wanted = chains(stores)
    for victim in range(parity):
        stores.each[victim] = NamedFake(f"new{victim}")
    seen = surveyed(stores)
    assert seen.redundancy == 0
    assert [s.problem is None for s in seen.stores] == [i >= parity for i in range(count)]
    assert sum(s.shards_missing for s in seen.stores) >= (0 if count == 2 else parity)
    done = healed(stores)
    assert done.joined == tuple(range(1, parity + 1))
    assert done.lost == {}
    seen = surveyed(stores)
    assert seen.redundancy == parity
    assert all(s.problem is None and s.records_missing == s.shards_missing == 0 for s in seen.stores)
    for other in range(parity, min(2 * parity, count)):
        stores.each[other].lose()
    assert chains(stores) == wanted


def test_what_was_missed_while_away() -> None:
    stores = saved()
    run = stores.run()
    writer = run.writer()
    stores.each[2].lose()
    writer.commit(BIG, step=4, kind="base", parent=None, state_digest="", meta={})
    stores.each[2].heal()
    seen = surveyed(stores)
    assert seen.stores[2].records_missing > 0
    assert seen.stores[2].last_step == 3
    assert healed(stores).records > 0
    assert surveyed(stores).stores[2].records_missing == 0


@pytest.mark.parametrize("where", ["payload", "header", "record"])
def test_damage_is_repaired_in_place(where: str) -> None:
    stores = saved()
    before = dict(stores.each[1].blobs)
    if where == "record":
        stores.damage(1, "commits/0000000001.json", 30)
    else:
        for name in stores.shards(1):
            stores.damage(1, str(name), 3 if where == "header" else name.geometry.header_bytes + 2)
    assert healed(stores).repaired == (1 if where == "record" else 3)
    assert {key: data for key, (data, _) in stores.each[1].blobs.items()} == {
        key: data for key, (data, _) in before.items()
    }


def test_damage_in_every_shard_but_different_blocks() -> None:
    stores = Stores()
    data = os.urandom(6 * BLOCK)
    writer = stores.run().writer()
    writer.commit(data, step=1, kind="base", parent=None, state_digest="", meta={})
    for store in range(3):
        [name] = stores.shards(store)
        stores.damage(store, str(name), name.geometry.header_bytes + store * BLOCK + 7)
    done = healed(stores)
    assert (done.repaired, done.lost) == (3, {})
    stores.each[0].lose()
    assert chains(stores)[0][1] == [data]


def damaged_and_blank() -> tuple[Stores, bytes]:
    """Five stores of which two have a damaged shard each, in different blocks, and a third is blank; and what they hold."""
    stores = Stores(5, 2)
    data = os.urandom(9 * BLOCK)
    stores.run().writer().commit(data, step=1, kind="base", parent=None, state_digest="", meta={})
    for store in range(2):
        [name] = stores.shards(store)
        stores.damage(store, str(name), name.geometry.header_bytes + store * BLOCK + 7)
    stores.each[2] = NamedFake("new")
    return stores, data


def test_damage_in_some_shards_while_another_store_is_blank() -> None:
    """Before, the damaged shards were repaired, and the blank store stayed without its own: the next losses were too many."""
    stores, data = damaged_and_blank()
    done = healed(stores)
    assert (done.joined, done.shards, done.repaired, done.lost) == ((3,), 1, 2, {})
    assert surveyed(stores).redundancy == 2
    for other in (3, 4):
        stores.each[other].lose()
    assert chains(stores)[0][1] == [data]


@pytest.mark.timeout(60)
def test_damage_in_some_shards_while_one_store_is_blank_and_another_fails_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Before, the same damaged shards were read again and again, for ever."""
    stores, data = damaged_and_blank()
    failed: list[str] = []
    original = stores.each[3].get

    def fails_once(key: str, *arguments: Any, **more: Any) -> bytes:
        if key.startswith("data/") and not failed:
            failed.append(key)
            raise StoreError("does not answer")
        return original(key, *arguments, **more)

    monkeypatch.setattr(stores.each[3], "get", fails_once)
    assert chains(stores)[0][1] == [data]
    assert len(failed) == 1


def test_a_shard_that_arrives_damaged_once_while_another_store_is_blank(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As a network may damage it: found by the campaign on two gateways, which lost a checkpoint after such a healing."""
    stores = saved()
    wanted = chains(stores)
    stores.each[1] = NamedFake("new")
    seen: set[str] = set()
    original = stores.each[0].get

    def get(key: str, *at: Any, **how: Any) -> bytes:
        data = original(key, *at, **how)
        if not key.startswith("data/") or key in seen:
            return data
        seen.add(key)
        return data[:-1] + bytes([data[-1] ^ 1])

    monkeypatch.setattr(stores.each[0], "get", get)
    assert healed(stores).lost == {}
    assert len(seen) == 3
    assert surveyed(stores).redundancy == 1
    stores.each[2].lose()
    assert chains(stores) == wanted


def test_what_cannot_be_healed_is_named() -> None:
    stores = saved()
    for store in (0, 1):
        for name in stores.shards(store):
            if name.geometry.k > 1:
                del stores.each[store].blobs[str(name)]
    seen = surveyed(stores)
    assert len(seen.unrestorable) == 2
    assert seen.redundancy == 0
    assert set(healed(stores).lost) == set(seen.unrestorable)


def test_leftovers_of_killed_saves_are_no_loss() -> None:
    stores = saved()
    stores.objects().put("data/000000000009-0123456789abcdef-0123456789abcdef.shrink", BIG)
    for store in (0, 1):
        for name in stores.shards(store):
            if "000000000009" in name.key:
                del stores.each[store].blobs[str(name)]
    done = healed(stores)
    assert done.lost == {}
    assert done.orphans == 1


def test_interrupted_anywhere_and_gone_on_with() -> None:
    """Until it holds everything, the store is none of the set; afterwards another one may be lost."""
    wanted: Any = None
    for at in range(200):
        stores = saved()
        stores.each[0] = new = NamedFake("new")
        wanted = {m.step: blobs for m, blobs in chains(stores)}
        new.fail_at(at)
        try:
            healed(stores)
        except (InjectedError, StoreError):
            new.heal()
            if MEMBER_KEY not in new.blobs:
                assert surveyed(stores).stores[0].problem is not None
                assert healed(stores).lost == {}
            else:
                healed(stores)
            assert surveyed(stores).redundancy == 1
            stores.each[1].lose()
            assert {m.step: blobs for m, blobs in chains(stores)} == wanted
            continue
        assert at > 10
        assert JOINING_KEY not in new.blobs
        return
    raise AssertionError("healing takes fewer operations")


def test_a_store_that_does_not_answer_is_not_given_up_silently() -> None:
    stores = saved()
    stores.each[2].lose()
    with pytest.raises(StoreError, match="c is gone"):
        healed(stores)


def test_something_else_is_not_written_over() -> None:
    stores = saved()
    other = NamedFake("other")
    RunStore("ignored", objects=other).writer()
    stores.each[1] = other
    before = dict(other.blobs)
    with pytest.raises(RunMismatchError, match="holds a run's files"):
        healed(stores)
    assert other.blobs == before


def test_while_it_is_saved_to() -> None:
    stores = saved()
    stores.each[0] = NamedFake("new")
    writer = stores.run().writer()
    steps = iter(range(10, 1000))

    def progress(done: int, of: int, key: str) -> None:
        assert 0 <= done <= of
        writer.commit(BIG, step=next(steps), kind="base", parent=None, state_digest="", meta={})

    assert healed(stores, progress=progress).lost == {}
    newest = next(steps) - 1
    for lost in range(3):
        stores.each[lost].lose()
        found = newest_sound(stores.run(), take)
        assert found is not None
        assert found[0].step == newest
        stores.each[lost].heal()


def test_progress_ends_with_everything() -> None:
    told: list[tuple[int, int, str]] = []
    healed(saved(), progress=lambda *what: told.append(what))
    assert told[-1][0] == told[-1][1]
    assert [done for done, _, _ in told] == list(range(len(told)))


def test_what_was_removed_while_a_store_was_away_is_not_lost() -> None:
    stores = saved()
    writer = stores.run().writer()
    for step in (4, 5):
        writer.commit(BIG, step=step, kind="base", parent=None, state_digest="", meta={})
    away = stores.each[2]
    kept = dict(away.blobs)
    objects = stores.objects()
    writer = stores.run(objects).writer()
    for _ in range(2):
        for each in stores.each:
            each.now += 10
        writer.collect(keep=[4], grace_s=0)
    away.blobs = kept
    before = set(kept)
    found = healed(stores)
    assert found.lost == {}
    assert 4 in found.outdated
    assert 2 in found.outdated
    # nor is it brought back: only the store that was away still lists it
    assert [key for each in stores.each[:2] for key in each.blobs if key == "commits/0000000001.json"] == []
    assert before <= set(away.blobs)
    assert healed(stores).outdated == found.outdated


def test_what_a_checkpoint_shares_with_a_removed_one_is_lost_all_the_same() -> None:
    stores = saved()
    first, delta = (stores.run().manifests()[i] for i in (2, 1))
    for each in stores.each[:2]:
        del each.blobs["commits/0000000000.json"]  # removed while the third was away
        for key in [key for key in each.blobs if key.startswith(first.chain[0].key)]:
            del each.blobs[key]
    assert list(healed(stores).lost) == [delta.chain[0].key]
