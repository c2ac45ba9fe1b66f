import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.fake_objects import FakeObjects, InjectedError
from support.losses import nearly_flat
from support.training import OPTIMIZERS, TinyMLP, capture, train

from shrinkpoint.coding.decode import decode_checkpoint
from shrinkpoint.config import SaverConfig
from shrinkpoint.container.reader import read_container
from shrinkpoint.errors import RunMismatchError
from shrinkpoint.saving.committer import Committer
from shrinkpoint.saving.reporting import Job
from shrinkpoint.saving.retention import record_of
from shrinkpoint.state.snapshot import Snapshot
from shrinkpoint.store.manifest import BlobRef, Manifest
from shrinkpoint.store.run import RunStore


@pytest.fixture
def objects():
    return FakeObjects()


class Training:
    def __init__(self, objects, optimizer="AdamW", **config):
        torch.manual_seed(0)
        self.model = TinyMLP()
        self.optimizer = OPTIMIZERS[optimizer](self.model)
        self.store = RunStore("fake://run", objects=objects)
        self.committer = Committer(self.store, SaverConfig(**{"scheme": "lossless", **config}), lambda: 0.0)
        self.steps = 0

    def commit(self, **options):
        train(self.model, self.optimizer, [self.steps])
        self.steps += 1
        state = capture(self.model, self.optimizer)
        facts = {
            "metrics": {},
            "measure": None,
            "gradients": None,
            "exact": False,
            "blocked_s": 0.5,
            **options,
        }
        return self.committer.commit(Job(snapshot=Snapshot(state, 0.5), step=self.steps, **facts))


def test_the_report_stands_in_the_manifest(objects):
    training = Training(objects)
    report = training.commit(metrics={"loss": 0.25})
    (manifest,) = training.store.manifests()
    stored = manifest.meta["save"]
    for name in ("step", "kind", "scheme", "configuration", "reason", "bytes", "raw_bytes", "blocked_s"):
        assert stored[name] == getattr(report, name)
    assert stored["metrics"] == {"loss": 0.25}
    assert report.seq == manifest.seq
    assert report.bytes == manifest.chain[-1].size
    assert sum(report.raw_sections.values()) == report.raw_bytes
    assert sum(report.sections.values()) < report.bytes
    assert set(report.sections) == {"weight", "exp_avg", "exp_avg_sq", "other"}


def test_deltas_name_their_parent(objects):
    training = Training(objects)
    for _ in range(3):
        training.commit()
    newest, middle, base = training.store.manifests()
    assert [m.kind for m in (base, middle, newest)] == ["base", "delta", "delta"]
    assert newest.parent_digest == middle.digest
    containers = [read_container(data) for data in training.store.fetch(newest)]
    assert [c.parent for c in containers] == [None, base.state_digest, middle.state_digest]
    assert containers[-1].provenance["torch"] == str(torch.__version__)


@pytest.mark.parametrize("key_every", [1, 2])
def test_short_chains(objects, key_every):
    training = Training(objects, key_every=key_every, longest_chain=key_every)
    assert [training.commit().kind for _ in range(4)] == (
        ["base", "delta"] * 2 if key_every == 2 else ["base"] * 4
    )


def test_a_dear_base_is_kept_until_its_deltas_have_taken_twice_its_bytes(objects):
    training = Training(objects, key_every=2)
    reports = [training.commit() for _ in range(7)]
    chain = [reports[0].bytes]
    for report in reports[1:]:
        paid_off = len(chain) >= 2 and sum(chain[1:]) >= 2 * chain[0]
        assert report.kind == ("base" if paid_off else "delta")
        chain = [report.bytes] if paid_off else [*chain, report.bytes]
    kinds = [report.kind for report in reports]
    assert kinds[:3] == ["base", "delta", "delta"]  # a lossless delta takes less than its base
    assert kinds.count("base") > 1


def test_every_checkpoint_is_a_base_where_key_every_is_1(objects):
    training = Training(objects, key_every=1)
    assert [training.commit().kind for _ in range(3)] == ["base"] * 3


def lengths_of_chains(sizes, **config):
    """How many checkpoints each chain has; sizes: of each checkpoint as a base, and as a delta."""
    committer = Committer(RunStore("fake://run", objects=FakeObjects()), SaverConfig(**config), lambda: 0.0)
    lengths, chain = [], []
    for base, delta in sizes:
        if not chain or committer._is_complete(chain):
            chain = []
            lengths.append(0)
        size = delta if chain else base
        chain.append(BlobRef(key=f"data/{4:012d}-{'ab' * 8}-{'cd' * 8}.shrink", size=size, sha256="0" * 64))
        lengths[-1] += 1
        deltas = sum(blob.size for blob in chain[1:-1])
        assert len(chain) <= SaverConfig(**config).key_every or deltas < 2 * chain[0].size
    return lengths


SIZES = st.lists(st.tuples(st.integers(1, 1000), st.integers(1, 1000)), min_size=1, max_size=40)


@given(sizes=SIZES, key_every=st.integers(1, 6), longer=st.none() | st.integers(0, 6))
def test_chains_of_any_sizes_end_between_key_every_and_the_limit(sizes, key_every, longer):
    longest = None if longer is None else key_every + longer
    config = {"key_every": key_every, "longest_chain": longest}
    lengths = lengths_of_chains(sizes, **config)
    assert max(lengths) <= SaverConfig(**config).chain_limit
    assert all(length >= key_every for length in lengths[:-1])  # the last one may go on
    if key_every == 1 and longest is None:
        assert set(lengths) == {1}


@given(sizes=SIZES, key_every=st.integers(1, 6))
def test_a_limit_of_key_every_gives_a_base_every_key_every(sizes, key_every):
    lengths = lengths_of_chains(sizes, key_every=key_every, longest_chain=key_every)
    assert set(lengths[:-1]) <= {key_every}


def test_a_base_that_costs_nothing_more_than_a_delta_is_made_every_key_every():
    assert lengths_of_chains([(100, 100)] * 9, key_every=3) == [3, 3, 3]
    assert lengths_of_chains([(100, 10)] * 30, key_every=3) == [12, 12, 6]  # the limit
    assert lengths_of_chains([(100, 50)] * 15, key_every=3) == [5, 5, 5]


def test_forgetting_makes_a_base(objects):
    training = Training(objects)
    training.commit()
    training.committer.forget()
    assert training.commit().kind == "base"


def seeds_of(store, codec="trellis-weight"):
    """The seed of the dither of every tensor of a codec in the newest checkpoint."""
    newest = read_container(store.fetch(store.manifests()[0])[-1])
    return [entry.encoded.params["seed"] for entry in newest.entries if entry.encoded.codec == codec]


def seeds_of_a_chain(objects, codec, **options):
    """Of four checkpoints, the third of which is of a training that went on from a restore."""
    training = Training(objects, scheme="auto", **options)
    seeds = []
    for restored in (False, False, True, False):
        if restored:
            newest = training.store.manifests()[0]
            decoded = decode_checkpoint(newest, training.store.fetch(newest))
            training.committer.forget()
            training.committer.adopt(newest, decoded.reference, decoded.state)
        training.commit(measure=nearly_flat)
        seeds.append(seeds_of(training.store, codec))
    assert all(len(set(chosen)) == len(chosen) > 1 for chosen in seeds)
    return seeds


def test_a_dither_of_levels_goes_on_through_a_chain_and_begins_anew_after_a_restore(objects):
    seeds = seeds_of_a_chain(objects, "log-levels", optimizer="Adamax")
    assert seeds[0] == seeds[1] != seeds[2] == seeds[3]


def test_weights_have_another_dither_in_every_checkpoint(objects):
    seeds = seeds_of_a_chain(objects, "trellis-weight")
    assert len({seed for chosen in seeds for seed in chosen}) == sum(map(len, seeds))


def test_weights_are_told_to_have_been_restored_once(objects):
    training = Training(objects, scheme="auto")
    told = []
    for restored in (False, False, True, False):
        if restored:
            newest = training.store.manifests()[0]
            decoded = decode_checkpoint(newest, training.store.fetch(newest))
            training.committer.forget()
            training.committer.adopt(newest, decoded.reference, decoded.state)
        training.commit(measure=nearly_flat)
        newest = read_container(training.store.fetch(training.store.manifests()[0])[-1])
        weights = [e.encoded for e in newest.entries if e.encoded.codec == "trellis-weight"]
        told.append([one.params.get("after_restore", False) for one in weights])
    assert [set(one) for one in told] == [{False}, {False}, {True}, {False}]


@pytest.mark.parametrize("resumed", [False, True])
def test_a_dither_begins_anew_after_a_checkpoint_that_is_exact(objects, resumed):
    training = Training(objects, scheme="auto")
    training.commit(measure=nearly_flat)
    before = seeds_of(training.store)
    if resumed:
        newest = training.store.manifests()[0]
        decoded = decode_checkpoint(newest, training.store.fetch(newest))
        training.committer.adopt(newest, decoded.reference, decoded.state)
    training.commit(exact=True)
    assert seeds_of(training.store) == []
    assert training.commit(measure=nearly_flat).kind == "delta"
    after = seeds_of(training.store)
    assert len(set(after) - {0} - set(before)) == len(before)


@pytest.mark.parametrize("operation", ["put", "put_if_absent"])
def test_after_a_failure_nothing_builds_on_what_may_be_missing(objects, operation):
    training = Training(objects)
    training.commit()

    def fail(called, key):
        if called == operation:
            raise InjectedError("no")

    objects.before = fail
    with pytest.raises(InjectedError):
        training.commit()
    objects.heal()
    assert training.commit().kind == "base"
    assert [m.step for m in training.store.manifests()] == [3, 1]


def test_a_foreign_prefix_is_refused_when_it_is_opened(objects):
    objects.put("thesis.tex", b"...")
    with pytest.raises(RunMismatchError):
        Training(objects).committer.open()


def test_closing_ends_the_turn_and_the_next_one_has_a_higher_epoch(objects):
    training = Training(objects)
    training.commit()
    training.committer.close()
    training.committer.close()
    assert training.commit().kind == "delta"
    assert [m.epoch for m in training.store.manifests()] == [2, 1]


def manifest_with(meta):
    ref = BlobRef(key=f"data/{4:012d}-{'ab' * 8}-{'cd' * 8}.shrink", size=1, sha256="0" * 64)
    return Manifest(
        seq=3, epoch=2, session="ab" * 8, step=4, kind="base", chain=(ref,), parent_digest=None, state_digest="",
        wall_time=0.0, library="", meta=meta,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("meta", "metric"),
    [
        ({"save": {"metrics": {"loss": 0.5}}}, 0.5),
        ({"save": {"metrics": {"loss": 2}}}, 2.0),
        ({"save": {"metrics": {"loss": None}}}, None),
        ({"save": {"metrics": {"loss": "0.5"}}}, None),
        ({"save": {"metrics": {"acc": 0.5}}}, None),
        ({"save": {"metrics": [1]}}, None),
        ({"save": 3}, None),
        ({}, None),
    ],
)
def test_what_retention_needs_to_know(meta, metric):
    record = record_of(manifest_with(meta), "loss")
    assert (record.seq, record.step, record.epoch, record.metric) == (3, 4, 2, metric)
    assert record_of(manifest_with(meta), None).metric is None
