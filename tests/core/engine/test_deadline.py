"""A save at a signal takes the way that fits into the time that is left."""

import signal
import time
from collections.abc import Callable
from typing import Any, ClassVar

import fsspec
import pcodec
import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem
from support.options import grouped

import shrinkpoint
from shrinkpoint.errors import ConfigError, ShrinkpointWarning


class Slow(MemoryFileSystem):
    """A store that takes a second for a kilobyte, by a clock of its own."""

    protocol = "slow"
    store: ClassVar[dict[str, Any]] = {}
    pseudo_dirs: ClassVar[list[str]] = [""]
    now = 0.0

    def pipe_file(self, path: Any, value: bytes, *args: Any, **options: Any) -> Any:
        Slow.now += len(value) / 1000
        return super().pipe_file(path, value, *args, **options)


@pytest.fixture(autouse=True)
def _slow(monkeypatch: pytest.MonkeyPatch) -> None:
    fsspec.register_implementation("slow", Slow, clobber=True)
    monkeypatch.setattr(Slow, "store", {})
    monkeypatch.setattr(Slow, "pseudo_dirs", [""])
    monkeypatch.setattr(time, "perf_counter", lambda: Slow.now)


def _checkpointer(**options: Any) -> Any:
    torch.manual_seed(0)
    model = torch.nn.Linear(64, 256)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    inputs = torch.randn(32, 64)

    def train() -> None:
        model(inputs).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    train()
    given = {"every": 1, "evaluate": lambda: float(model(inputs).square().mean())}
    made = shrinkpoint.Checkpointer("slow://bucket/run", model, optimizer, **grouped(**{**given, **options}))
    made.train = train
    made.values = lambda: [
        model.weight,
        model.bias,
        *(value for p in model.parameters() for value in optimizer.state[p].values()),
    ]
    return made


def _at_a_signal(**options: Any) -> Any:
    """The reports of a planned save and of one at a signal, the latter's manifest, and what was saved."""
    checkpointer = _checkpointer(**options)
    checkpointer.resume()
    checkpointer.step(1)
    checkpointer.flush()
    checkpointer.train()
    signal.raise_signal(signal.SIGTERM)
    with pytest.raises(SystemExit):
        checkpointer.step(2)
    first, last = checkpointer.reports()
    assert (first.step, last.step) == (1, 2)
    return first, last, checkpointer.saver.store.manifests()[0], checkpointer.values()


# 64 * 256 weights and biases in fp32 and two moments of each: 200 kB, of which 67 kB are weights.
WAYS: dict[str, tuple[float | None, Callable[[Any, Any], bool]]] = {
    "no deadline": (None, lambda report, meta: report.measured == "exact" and not meta.get("weights_only")),
    "exactly": (300.0, lambda report, meta: report.measured == "exact" and not meta.get("weights_only")),
    "lossily": (90.0, lambda report, meta: report.measured != "exact" and not meta.get("weights_only")),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.filterwarnings("ignore::shrinkpoint.errors.ShrinkpointWarning")
def test_the_most_exact_way_that_fits_is_taken(way: str) -> None:
    deadline_s, right = WAYS[way]
    first, last, manifest, _ = _at_a_signal(deadline_s=deadline_s)
    assert first.measured != "exact"
    assert right(last, manifest.meta)


def test_where_nothing_fits_it_is_said_beforehand_and_the_weights_alone_are_saved() -> None:
    with pytest.warns(ShrinkpointWarning) as caught:
        _, last, manifest, _ = _at_a_signal(scheme="lossless", deadline_s=1.0)
    said = [str(warning.message) for warning in caught]
    assert any("will not fit into deadline_s=1" in line for line in said)
    assert any("is made without the optimizer's state" in line for line in said)
    assert last.measured == "exact"
    assert manifest.meta["weights_only"] is True
    resumed = _checkpointer(scheme="lossless")
    with pytest.warns(ShrinkpointWarning, match="optimizer"):
        assert resumed.resume() == 2


def test_raw_bytes_are_saved_where_coding_takes_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """The store takes 200 seconds for the state's bytes, and coding another 100 or more."""
    compress = pcodec.standalone.simple_compress

    def slowly(*arguments: Any) -> Any:
        Slow.now += 100
        return compress(*arguments)

    monkeypatch.setattr(pcodec.standalone, "simple_compress", slowly)
    with pytest.warns(ShrinkpointWarning, match="this save is made as raw bytes"):
        first, last, manifest, saved = _at_a_signal(scheme="lossless", deadline_s=250.0)
    assert first.bytes < first.raw_bytes <= last.bytes < 1.1 * last.raw_bytes
    assert last.measured == "exact"
    assert not manifest.meta.get("weights_only")
    resumed = _checkpointer(scheme="lossless")
    assert resumed.resume() == 2
    assert all(map(torch.equal, resumed.values(), saved))


def test_what_is_no_time_is_refused() -> None:
    with pytest.raises(ConfigError, match="deadline_s"):
        _checkpointer(deadline_s=-1)
