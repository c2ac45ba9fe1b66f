"""Heads and their parts: committed together, collected together, and never one without the other."""

import hashlib

import pytest
from support.fake_objects import FakeObjects
from support.newest import newest_sound

from shrinkpoint.errors import (
    ChainError,
    ConfigError,
    CorruptionError,
    FencedError,
    FormatError,
    UnsupportedFormatError,
)
from shrinkpoint.store import manifest as manifests
from shrinkpoint.store.keys import data_key
from shrinkpoint.store.manifest import BlobRef, Head, Manifest, Part, seal
from shrinkpoint.store.retry import RetryPolicy
from shrinkpoint.store.run import RunStore

DAY = 86400.0


class Run:
    """A run of which three ranks write each checkpoint."""

    def __init__(self) -> None:
        self.fake = FakeObjects()
        self.store = self.reopen()
        self.writer = self.store.writer()

    def reopen(self) -> RunStore:
        return RunStore("ignored", objects=self.fake, retry=RetryPolicy(attempts=1))

    def parts(self, step: int, count: int = 3) -> list[Part]:
        return [
            Part(
                ref=self.store.put_part(data_key(step, self.writer.session), b"%d of %d" % (rank, step)),
                state_digest=f"{step:016x}{rank:016x}",
            )
            for rank in range(count)
        ]

    def save(self, step: int, parent: Manifest | None = None) -> Manifest:
        began = self.writer.now()
        head = Head(step=step, parts=tuple(self.parts(step)))
        return self.writer.commit(
            head,
            step=step,
            kind="delta" if parent else "base",
            parent=parent,
            state_digest=head.state_digest,
            meta={},
            began=began,
        )

    def stored(self) -> set[str]:
        return {key for key in self.fake.blobs if key.startswith("data/")}


@pytest.fixture
def run() -> Run:
    return Run()


def test_a_checkpoint_of_parts_is_read_like_any_other(run: Run) -> None:
    base = run.save(1)
    delta = run.save(2, base)
    assert run.reopen().manifests() == [delta, base]
    assert run.store.fetch(delta) == [b"%d of %d" % (rank, step) for step in (1, 2) for rank in range(3)]
    assert delta.reader_features == ("parts",)
    assert [ref.parts for ref in delta.chain] == [3, 3]
    assert delta.stored_bytes == sum(len(run.fake.blobs[key][0]) for key in run.stored())
    assert delta.state_digest == run.store.head(delta.chain[-1]).state_digest != base.state_digest


def test_a_single_process_continues_parts_and_the_reverse(run: Run) -> None:
    base = run.writer.commit(b"alone", step=1, kind="base", parent=None, state_digest="", meta={})
    assert base.reader_features == ()
    assert b"parts" not in base.to_bytes()  # what one process writes has not grown
    middle = run.save(2, base)
    last = run.writer.commit(b"again", step=3, kind="delta", parent=middle, state_digest="", meta={})
    assert run.reopen().fetch(last) == [b"alone", b"0 of 2", b"1 of 2", b"2 of 2", b"again"]
    assert last.reader_features == ("parts",)


def test_a_release_that_does_not_know_parts_refuses_by_name_and_collects_nothing(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in range(1, 4):
        run.save(step)
        run.fake.now += 1
    before = run.stored()
    monkeypatch.setattr(manifests, "READER_FEATURES", ())
    old = run.reopen()
    with (
        pytest.warns(match="unreadable checkpoint"),
        pytest.raises(UnsupportedFormatError, match=r"needs features \['parts'\]"),
    ):
        newest_sound(old, lambda manifest, containers: None)
    writer = old.writer()
    run.fake.now += 10 * DAY
    writer.collect((), grace_s=DAY)
    assert run.stored() == before


def test_parts_go_with_their_head_and_not_before(run: Run) -> None:
    first = run.save(1)
    second = run.save(2)
    third = run.save(3, second)
    own = {ref.key for ref in run.store.refs(first)}
    assert len(own) == 4
    run.fake.now += 2 * DAY
    report = run.writer.collect([third.seq])
    assert report.blobs_removed == ()  # its grace begins
    run.fake.now += 2 * DAY
    report = run.writer.collect([third.seq])
    assert set(report.blobs_removed) == own
    assert run.store.fetch(third)


def test_parts_of_a_save_that_was_never_committed_are_garbage(run: Run) -> None:
    lost = {part.ref.key for part in run.parts(1)}
    kept = run.save(2)
    run.fake.now += 2 * DAY
    assert set(run.writer.collect([kept.seq]).blobs_removed) == lost


def test_a_head_that_cannot_be_read_keeps_everything_older(run: Run) -> None:
    old = run.save(1)
    run.fake.now += DAY
    middle = run.save(2)
    run.fake.now += DAY
    newest = run.save(3)
    run.fake.now += DAY
    late = {part.ref.key for part in run.parts(4)}  # of a save that failed later
    before = run.stored()
    head = middle.chain[-1].key
    data, modified = run.fake.blobs[head]
    run.fake.blobs[head] = b"x" * len(data), modified
    store = run.reopen()
    writer = store.writer()
    for _ in range(2):
        run.fake.now += 3 * DAY
        writer.collect([newest.seq, middle.seq])
    assert before - run.stored() == late
    assert old.digest not in {manifest.digest for manifest in store.manifests()}


def test_a_missing_or_damaged_part_or_head_makes_its_checkpoint_unsound(run: Run) -> None:
    good = run.save(1)
    bad = run.save(2)
    part = run.store.head(bad.chain[-1]).parts[1].ref.key
    whole, modified = run.fake.blobs[part]

    def newest() -> Manifest:
        with pytest.warns(match="passed over"):
            found = newest_sound(run.reopen(), lambda manifest, containers: None)
        assert found is not None
        return found[0]

    run.fake.blobs[part] = whole[::-1], modified
    assert newest() == good
    with pytest.raises(CorruptionError, match="does not match its checksum"):
        run.reopen().fetch(bad)
    del run.fake.blobs[part]
    assert newest() == good
    head = Head(step=3, parts=tuple(run.parts(3)))
    with pytest.raises(ChainError, match="is missing"):
        run.writer.commit(head, step=3, kind="delta", parent=bad, state_digest=head.state_digest, meta={})
    del run.fake.blobs[bad.chain[-1].key]
    assert newest() == good
    with pytest.raises(ChainError, match="the head of 3 parts, is missing"):
        run.reopen().refs(bad)
    # retention counts on the newest that is whole
    run.reopen().writer().collect(())
    assert [m.step for m in run.reopen().manifests()] == [1]


def test_heads_are_checked_field_by_field(run: Run) -> None:
    parts = run.parts(1)
    head = Head(step=1, parts=tuple(parts))
    assert Head.from_bytes(head.to_bytes(), "head") == head
    with pytest.raises(FormatError, match="a head of 0 parts"):
        Head(step=1, parts=())
    with pytest.raises(FormatError, match="a head of 2 parts with 1 keys"):
        Head(step=1, parts=(parts[0], parts[0]))
    with pytest.raises(FormatError, match="is not the head of a checkpoint"):
        Head.from_bytes(seal({"type": "shrinkpoint-manifest"}), "head")
    with pytest.raises(FormatError, match="lacks a field"):
        Head.from_bytes(seal({"type": "shrinkpoint-parts", "step": 1, "parts": [{}]}), "head")
    with pytest.raises(CorruptionError):
        Head.from_bytes(head.to_bytes()[:-1], "head")
    nested = BlobRef(
        key=parts[0].ref.key, size=1, sha256=hashlib.sha256().hexdigest(), parts=2, parts_bytes=3
    )
    with pytest.raises(FormatError, match="is a part, and cannot have parts"):
        Part(ref=nested, state_digest="0" * 32)
    with pytest.raises(FormatError, match="32 hexadecimal digits"):
        Part(ref=parts[0].ref, state_digest="")


def test_a_head_names_thousands_of_parts_and_refuses_more_than_a_record_holds() -> None:
    def head(count: int) -> Head:
        session, digest = "0" * 16, "0" * 64
        parts = (
            Part(
                ref=BlobRef(key=f"data/{1:012d}-{session}-{number:016x}.shrink", size=1, sha256=digest),
                state_digest=f"{number:032x}",
            )
            for number in range(count)
        )
        return Head(step=1, parts=tuple(parts))

    assert len(head(4096).to_bytes()) < manifests.MAX_MANIFEST_BYTES
    with pytest.raises(ConfigError, match="save from fewer ranks"):
        head(6000).to_bytes()


def test_undelete_brings_back_a_checkpoint_with_all_its_parts(run: Run) -> None:
    first = run.save(1)
    run.save(2)
    run.writer.collect(())
    assert [m.step for m in run.store.removed()] == [1]
    run.writer.undelete(first)
    assert run.store.fetch(first) == [b"%d of 1" % rank for rank in range(3)]
    part = run.store.head(first.chain[-1]).parts[2].ref.key
    run.writer.collect(())
    del run.fake.blobs[part]
    assert run.store.removed() == []


def test_a_writer_that_is_fenced_off_commits_no_parts(run: Run) -> None:
    run.save(1)
    other = run.reopen().writer()
    other.commit(b"", step=2, kind="base", parent=None, state_digest="", meta={})
    with pytest.raises(FencedError):
        run.save(3)
    assert [m.step for m in run.reopen().manifests()] == [2, 1]
