from types import SimpleNamespace

import pytest
import torch
from support.containers import identical
from support.fake_objects import FakeObjects, InjectedError
from support.losses import nearly_flat
from support.training import OPTIMIZERS, TinyMLP, capture, train

from shrinkpoint.coding.selective import decode_checkpoint
from shrinkpoint.config import SaverConfig
from shrinkpoint.container.reader import read_container
from shrinkpoint.engine.background import Background
from shrinkpoint.engine.chain import Chain
from shrinkpoint.engine.placement import Placement
from shrinkpoint.engine.request import Job, Way
from shrinkpoint.errors import RunMismatchError, ShrinkpointWarning
from shrinkpoint.state.snapshot import Snapshot
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
        self.config = SaverConfig(**{"scheme": "lossless", **config})
        self.steps = 0
        self.start()

    def start(self):
        """In a process that knows nothing yet."""
        self.chain = Chain(self.store, self.config)
        self.background = Background(Placement(self.store, self.config), self.chain)

    def commit(self, **options):
        train(self.model, self.optimizer, [self.steps])
        self.steps += 1
        state = capture(self.model, self.optimizer)
        job = Job(snapshot=Snapshot(state, 0.5), step=self.steps, blocked_s=0.5, **options)
        return self.background.commit(job)

    def adopt(self, manifest, decoded):
        self.background.continue_from(
            SimpleNamespace(manifest=manifest, reference=decoded.reference, own_state=decoded.state)
        )


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


def of_newest(store):
    manifest = store.manifests()[0]
    return manifest, decode_checkpoint(store, manifest)


@pytest.mark.parametrize(
    ("key_every", "lengths"),
    [
        (1, [1] * 10),
        (2, [1, 2, 2, 3, 3, 4, 4, 5, 1, 2]),
        (3, [1, 2, 3, 2, 3, 4, 3, 4, 5, 4, 5, 6, 1, 2, 3, 2]),
    ],
)
def test_every_so_many_checkpoints_one_builds_on_the_one_as_many_before(objects, key_every, lengths):
    training, made = Training(objects, key_every=key_every), []
    for length in lengths:
        report = training.commit()
        manifest, decoded = of_newest(training.store)
        made.append(manifest)
        assert len(manifest.chain) == length
        assert report.kind == ("base" if length == 1 else "delta")
        assert identical(decoded.state.to_object(), capture(training.model, training.optimizer).to_object())
    by_digest = {manifest.digest: manifest for manifest in made}
    for manifest in made:
        if manifest.kind == "delta":
            assert by_digest[manifest.parent_digest].chain == manifest.chain[:-1]


@pytest.mark.parametrize("scheme", ["lossless", "auto"])
def test_an_anchor_is_built_on_after_its_manifest_is_gone_and_after_a_resume(objects, scheme):
    training = Training(objects, scheme=scheme, key_every=3, keep_last=1, grace_s=0.0)
    lengths = []
    for step in range(13):
        objects.now += 10
        if step == 5:
            training.chain.close()
            manifest, decoded = of_newest(training.store)
            training.start()
            training.adopt(manifest, decoded)
        training.commit(measure=nearly_flat)
        (manifest,) = training.store.manifests()
        lengths.append(len(manifest.chain))
        assert of_newest(training.store)[1].state.tensors
    assert lengths == [1, 2, 3, 2, 3, 4, 3, 4, 5, 4, 5, 6, 1]
    assert len([key for key in objects.blobs if key.startswith("data/")]) == 1


def test_where_an_anchor_is_damaged_the_next_one_is_a_base(objects):
    training = Training(objects, key_every=2)
    for _ in range(2):
        training.commit()
    key = training.store.manifests()[0].chain[0].key
    data, written = objects.blobs[key]
    objects.blobs[key] = data[: len(data) // 2] + b"damaged" + data[len(data) // 2 + 7 :], written
    with pytest.warns(ShrinkpointWarning, match="is stored as a base"):
        report = training.commit()
    assert report.kind == "base"
    assert identical(
        of_newest(training.store)[1].state.to_object(),
        capture(training.model, training.optimizer).to_object(),
    )


def test_a_damaged_base_is_done_without_although_most_of_it_is_unchanged(objects):
    training = Training(objects, key_every=2, optimizer="SGD")
    training.model.inner.weight.requires_grad_(False)
    lengths = []
    for _ in range(14):
        training.commit()
        lengths.append(len(training.store.manifests()[0].chain))
    assert lengths[7:] == [5, 2, 3, 3, 4, 4, 5]
    key = training.store.manifests()[0].chain[0].key
    data, written = objects.blobs[key]
    objects.blobs[key] = data[:-8] + bytes(8), written
    with pytest.warns(ShrinkpointWarning, match="stored as a base"):
        assert training.commit().kind == "base"
    assert of_newest(training.store)[0].step == 15


def test_rows_that_moved_since_the_anchor_are_not_taken_from_it(objects):
    training = Training(objects, scheme="auto", key_every=3, optimizer="SGD")
    weight = training.model.inner.weight
    weight.register_hook(lambda gradient: torch.cat([torch.zeros(2, 64), gradient[2:]]))
    for step in range(4):
        training.commit(measure=nearly_flat)
        if step == 1:
            with torch.no_grad():
                weight[:2] += 1.0
    manifest, decoded = of_newest(training.store)
    assert len(manifest.chain) == 2
    (restored,) = (t for name, t in decoded.state.tensors.items() if name.endswith("inner.weight"))
    assert (restored - weight).abs().max() < 0.1


def test_levels_share_no_dither_with_an_anchor_from_before_a_restore(objects):
    training, seeds = Training(objects, scheme="auto", optimizer="Adamax", key_every=2), []
    for step in range(6):
        if step == 3:
            manifest, decoded = of_newest(training.store)
            training.background.link = None
            training.adopt(manifest, decoded)
        training.commit(measure=nearly_flat)
        seeds.append(seeds_of(training.store, "log-levels"))
    assert seeds[0] == seeds[1] == seeds[2]
    assert len({tuple(one) for one in seeds[2:5]}) == 3, seeds
    assert seeds[4] == seeds[5]


def test_forgetting_makes_a_base(objects):
    training = Training(objects)
    training.commit()
    training.background.link = None
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
            decoded = decode_checkpoint(training.store, newest)
            training.background.link = None
            training.adopt(newest, decoded)
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


@pytest.mark.parametrize("resumed", [False, True])
def test_a_dither_begins_anew_after_a_checkpoint_that_is_exact(objects, resumed):
    training = Training(objects, scheme="auto")
    training.commit(measure=nearly_flat)
    before = seeds_of(training.store)
    if resumed:
        newest = training.store.manifests()[0]
        decoded = decode_checkpoint(training.store, newest)
        training.adopt(newest, decoded)
    training.commit(way=Way(exact=True))
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
        Training(objects).chain.open()


def test_closing_ends_the_turn_and_the_next_one_has_a_higher_epoch(objects):
    training = Training(objects)
    training.commit()
    training.chain.close()
    training.chain.close()
    assert training.commit().kind == "delta"
    assert [m.epoch for m in training.store.manifests()] == [2, 1]
