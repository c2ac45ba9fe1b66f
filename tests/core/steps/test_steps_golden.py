"""The bytes of both kinds of log are those that earlier versions wrote."""

import hashlib

import numpy as np
import torch

from shrinkpoint.state.training import TrainingState
from shrinkpoint.steps.record import Dense, Event, Record, Sparse, encode_record
from shrinkpoint.steps.segment import Head, Key, Place, Reference, TensorTable, pack
from shrinkpoint.steps.updates import Layout, ReadersWeights

RUN = "0123456789abcdef" * 2
PLACES = Place(4, "ab" * 16), Place(6, "cd" * 16)


def noise(*shape: int, seed: int, scale: float = 1.0) -> torch.Tensor:
    """Random numbers that no version of a library changes."""
    words = np.arange(np.prod(shape), dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(seed)
    words ^= words >> np.uint64(29)
    words *= np.uint64(0xBF58476D1CE4E5B9)
    values = ((words >> np.uint64(40)).astype(np.float32) / np.float32(2**23) - 1) * np.float32(scale)
    return torch.from_numpy(values.reshape(shape))


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:32]


def segment(kind: str, records: list, table: TensorTable, layout: object = None) -> bytes:
    head = Head(
        run=RUN,
        kind=kind,
        key=Key(3, "00112233445566aa", 2),
        begin=PLACES[0],
        end=PLACES[1],
        records=records,
        tensors=table.specs,
        layout=layout,
        provenance={"shrinkpoint": "0"},
        previous="ef" * 16,
    )
    return pack(head, table.parts)[0]


def test_a_segment_of_exact_steps():
    mostly_zero = noise(2000, seed=2)
    mostly_zero[torch.arange(2000) % 50 > 0] = 0
    gradients = [
        Dense(noise(5, 3, seed=1)),
        Dense(noise(2, 3, 2, 2, seed=4), (0, 2, 3, 1)),
        Dense(mostly_zero),
        Dense(noise(9, seed=3).to(torch.bfloat16)),
        Sparse(torch.tensor([[0, 4, 2]]), noise(3, 4, seed=5), (6, 4), False),
        None,
    ]
    event = Event(
        optimizer=0,
        groups=[{"lr": 0.1, "betas": (0.9, 0.999), "foreach": None}],
        attributes={"found_inf": torch.zeros(1)},
        closure=True,
        loss=torch.tensor(0.5),
        gradients=gradients,
    )
    remainder = TrainingState.capture({"rng": {"torch": torch.arange(7)}, "gradients": [["kept", None]]})
    table = TensorTable()
    records = [
        encode_record(Record(begin=4, end=5, events=[event]), table),
        encode_record(Record(begin=5, end=6, events=[event], remainder=remainder), table),
    ]
    assert sha256(segment("exact", records, table)) == "1c06dbb79550571769bb7d025f1c9e28"


def test_a_writers_first_segment():
    inherits = (Reference(Key(2, "00112233445566bb", 7), "12" * 16, *PLACES),)
    head = Head(
        run=RUN, kind="exact", key=Key(3, "00112233445566aa", 0), begin=None, end=None, inherits=inherits
    )
    assert sha256(pack(head, [])[0]) == "2d35cfc72ee7ede58aced32d7a382850"


def test_a_segment_of_quantized_updates():
    base = {
        "large": noise(300, 70, seed=6),
        "half": noise(40, 50, seed=7).to(torch.bfloat16),
        "small": noise(7, seed=8),
        "count": torch.tensor(3),
    }
    base["tied"] = base["large"]
    layout, table, records = Layout.of(base), TensorTable(), []
    reader = ReadersWeights(layout, base)
    for step in (5, 6):
        large = base["large"] + noise(300, 70, seed=step, scale=2e-2)
        large[7, 9] = float("nan") if step == 6 else 0.3
        now = {
            **base,
            "large": large,
            "tied": large,
            "small": base["small"] * step,
            "count": torch.tensor(step),
        }
        now["half"] = base["half"] + noise(40, 50, seed=10 + step, scale=0.1).to(torch.bfloat16)
        scales = [np.float32(8e-3), np.float32(2e-2)] if step == 5 else [np.float32(1e-5), np.float32(0)]
        records.append(reader.encode(step, now, lambda _, scales=scales: scales, table))
    assert [record["digest"] for record in records] == [
        "93c2ada7f7a3b0147922b6826ca214c1",
        "f4215300459f12e5c963a62eaae8f89c",
    ]
    assert sha256(segment("small", records, table, layout.to_json())) == "2d3f20bb09a25826b3dc591f7ceb36db"
