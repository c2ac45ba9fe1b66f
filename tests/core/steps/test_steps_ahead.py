"""The first segment of a replay is read while the checkpoint is decoded, and changes nothing but the time."""

import itertools
import shutil
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.stepped import Training

from shrinkpoint.errors import ChainError, FormatError, ShrinkpointWarning, StoreError
from shrinkpoint.saver import Saver
from shrinkpoint.state.dtypes import tensor_to_bytes
from shrinkpoint.steps import reader, record
from shrinkpoint.steps.reader import FirstSegment, LogReader
from shrinkpoint.steps.record import Tensors, UnpackedTensors

FIRST = "shrinkpoint-replay-first"
END = 9


@pytest.fixture(scope="module")
def truth() -> list[str]:
    training = Training()
    digests = [training.digest]
    for step in range(END):
        training.run(step, step + 1)
        digests.append(training.digest)
    return digests


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A crash after nine steps: a checkpoint of step 5, and segments of two steps behind it."""
    folder = tmp_path_factory.mktemp("written")
    training = Training().log(f"{folder}/run", f"{folder}/log")
    training.checkpointer.resume()
    training.run(0, END)
    training.crash()
    return folder


@pytest.fixture
def crashed(written: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(written, tmp_path / "copy"))


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, str]]:
    """The step at the beginning of each segment that is read whole, and the thread that reads it."""
    found, honest = [], LogReader.load_unpacked

    def load(self, reference):
        found.append((reference.begin.step, threading.current_thread().name.partition("_")[0]))
        return honest(self, reference)

    monkeypatch.setattr(LogReader, "load_unpacked", load)
    return found


def again(folder: Path, **options) -> Training:
    return Training().log(f"{folder}/run", f"{folder}/log", **options)


def ended() -> bool:
    for thread in threading.enumerate():
        if thread.name == FIRST:
            thread.join(20)
    return all(thread.name != FIRST for thread in threading.enumerate())


def test_each_segment_is_read_once(crashed, truth, loads):
    training = again(crashed)
    assert training.checkpointer.resume() == END
    assert training.digest == truth[END]
    assert sorted(loads) == [(5, FIRST), (7, "shrinkpoint-replay")]
    assert ended()
    training.checkpointer.close()


def test_it_is_read_while_the_checkpoint_is_decoded(crashed, truth, loads, monkeypatch):
    honest = Saver._decode

    def decode(self, manifest):
        assert ended()
        assert loads == [(manifest.step, FIRST)]
        return honest(self, manifest)

    monkeypatch.setattr(Saver, "_decode", decode)
    training = again(crashed)
    assert training.checkpointer.resume() == END
    assert training.digest == truth[END]
    training.checkpointer.close()


@pytest.mark.parametrize("error", [StoreError, FormatError, MemoryError, RuntimeError])
@pytest.mark.parametrize("where", ["survey", "load_unpacked"])
@pytest.mark.filterwarnings("error::shrinkpoint.errors.ShrinkpointWarning")
def test_what_fails_there_is_read_again(crashed, truth, monkeypatch, where, error):
    honest, failed = getattr(LogReader, where), []

    def read(self, *arguments):
        if threading.current_thread().name == FIRST:
            failed.append(where)
            raise error("not now")
        return honest(self, *arguments)

    monkeypatch.setattr(LogReader, where, read)
    training = again(crashed)
    assert training.checkpointer.resume() == END
    assert training.digest == truth[END]
    assert failed == [where]
    training.checkpointer.close()


def test_what_fails_again_is_told_as_ever(crashed, truth, monkeypatch):
    def load(self, reference):
        raise StoreError("the disk is gone")

    monkeypatch.setattr(LogReader, "load_unpacked", load)
    training = again(crashed)
    with pytest.warns(ShrinkpointWarning, match="the disk is gone"):
        assert training.checkpointer.resume() == 5
    assert training.digest == truth[5]
    training.checkpointer.close()


def test_without_threads_the_replay_reads_it(crashed, truth, loads, monkeypatch):
    honest = threading.Thread.start

    def start(self):
        if self.name == FIRST:
            raise RuntimeError("can't start new thread")
        honest(self)

    monkeypatch.setattr(threading.Thread, "start", start)
    training = again(crashed)
    assert training.checkpointer.resume() == END
    assert training.digest == truth[END]
    assert [name for _, name in loads] == ["shrinkpoint-replay"] * 2
    training.checkpointer.close()


@pytest.mark.filterwarnings("error::shrinkpoint.errors.ShrinkpointWarning")
def test_a_log_that_is_not_wanted_is_not_read(crashed, loads):
    chosen = again(crashed)
    assert chosen.checkpointer.resume(step=5) == 5
    never = again(crashed, resume="never")
    assert never.checkpointer.resume() == 0
    assert loads == []
    for training in (chosen, never):
        training.crash()


def test_a_checkpoint_that_cannot_be_read_is_the_error(crashed, monkeypatch):
    def load(self, reference):
        raise StoreError("the disk is gone")

    monkeypatch.setattr(LogReader, "load_unpacked", load)
    for path in (crashed / "run" / "data").iterdir():
        path.write_bytes(path.read_bytes()[:-9])
    training = again(crashed)
    with pytest.warns(ShrinkpointWarning, match="passed over"), pytest.raises(ChainError):
        training.checkpointer.resume()
    assert ended()
    training.crash()


def test_the_checkpoint_that_is_restored_counts(tmp_path, loads):
    training = Training().log(f"{tmp_path}/run", f"{tmp_path}/log", every=2, steps=1)
    training.checkpointer.resume()
    training.run(0, 7)
    training.crash()
    newest = max((tmp_path / "run" / "data").iterdir())
    newest.write_bytes(newest.read_bytes()[:-9])
    truth = training.digest
    resumed = again(tmp_path, every=2, steps=1)
    with pytest.warns(ShrinkpointWarning, match="passed over for an older one"):
        assert resumed.checkpointer.resume() == 7
    assert resumed.digest == truth
    assert ended()
    assert [step for step, _ in loads if step == 4] == [4]  # once: what was read for step 6 is of no use
    assert {step for step, name in loads if name == FIRST} <= {6, 4}
    resumed.checkpointer.close()


def test_another_segment_than_the_one_that_was_read(crashed):
    training = again(crashed)
    folder = training.checkpointer.step_log._folder
    *_, other, last = folder.reader().survey().references
    first = FirstSegment(other.begin.step, folder.reader)
    first.start()
    first._thread.join(20)
    assert first.take(last) is None
    assert first.take(other) is None  # it is let go of then
    training.crash()


def test_what_is_dropped_meanwhile_is_not_kept(crashed, monkeypatch):
    begun, goes_on, honest = threading.Event(), threading.Event(), LogReader.load_unpacked

    def load(self, reference):
        begun.set()
        assert goes_on.wait(20)
        return honest(self, reference)

    monkeypatch.setattr(LogReader, "load_unpacked", load)
    training = again(crashed)
    first = FirstSegment(5, training.checkpointer.step_log._folder.reader)
    first.start()
    assert begun.wait(20)
    first.drop()
    goes_on.set()
    first._thread.join(20)
    assert not first._thread.is_alive()
    assert first._found is None
    training.crash()


@pytest.mark.parametrize("piece", [100, 1000, 4096])
def test_segments_that_are_read_in_pieces(crashed, truth, monkeypatch, piece):
    monkeypatch.setattr(reader, "_PIECE", piece)
    monkeypatch.setattr(record, "_BLOCK", 2000)
    training = again(crashed)
    assert training.checkpointer.resume() == END
    assert training.digest == truth[END]
    training.checkpointer.close()


@pytest.mark.parametrize("piece", [100, 1 << 24])
@pytest.mark.parametrize("place", [-1, -40, -4000])
def test_a_changed_bit_in_any_piece_is_detected(crashed, truth, monkeypatch, piece, place):
    monkeypatch.setattr(reader, "_PIECE", piece)
    path = max((crashed / "log").rglob("*.steps"))
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)
    training = again(crashed)
    with pytest.warns(ShrinkpointWarning, match="checksum of its tensors"):
        assert training.checkpointer.resume() == 7
    assert training.digest == truth[7]
    training.checkpointer.close()


@given(
    specs=st.lists(
        st.tuples(
            st.sampled_from(["uint8", "float32", "float64", "bfloat16"]),
            st.lists(st.integers(0, 9), max_size=3),
        ),
        max_size=12,
    ),
    cuts=st.lists(st.integers(0, 3000), max_size=6),
    block=st.sampled_from([64, 200, 1 << 24]),
)
def test_unpacked_tensors_are_the_same(specs, cuts, block):
    listed = [list(spec) for spec in specs]
    sizes = [int(np.prod(shape)) * getattr(torch, name).itemsize for name, shape in specs]
    data = np.random.default_rng(0).integers(0, 256, sum(sizes), dtype=np.uint8).tobytes()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(record, "_BLOCK", block)
        unpacked = UnpackedTensors(listed, len(data))
    places = sorted({0, len(data), *(min(cut, len(data)) for cut in cuts)})
    for begin, end in itertools.pairwise(places):
        unpacked.fill(memoryview(data)[begin:end])
    plain = Tensors(listed, memoryview(data))
    for index, size in enumerate(sizes):
        one, other, copied = plain(index), unpacked(index), unpacked(index)
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        assert np.array_equal(tensor_to_bytes(one), tensor_to_bytes(other))
        if size:
            assert other.data_ptr() % 64 == 0
            assert copied.data_ptr() != other.data_ptr()
    with pytest.raises(FormatError, match="take"):
        UnpackedTensors(listed, len(data) + 1)
