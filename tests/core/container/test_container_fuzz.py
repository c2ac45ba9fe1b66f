"""Mutated files: damage is always noticed, and whatever a hostile author seals is read or refused, never worse."""

import json
import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.containers import MAGIC, assemble, load_raw, take_apart
from support.mutations import mutate, mutate_json

from shrinkpoint.container.reader import read_container
from shrinkpoint.errors import FormatError

pytestmark = pytest.mark.filterwarnings("ignore")

GOLDEN = [
    (Path(__file__).parents[2] / "golden" / f"v1_{kind}.shrink").read_bytes() for kind in ("base", "delta")
]


def is_refused(data: bytes) -> bool:
    try:
        read_container(data)
    except FormatError:
        return True
    return False


def damage_campaign(count: int, seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(count):
        data = rng.choice(GOLDEN)
        mutated = mutate(data, rng)
        assert mutated == data or is_refused(mutated)


def hostile_campaign(count: int, seed: int) -> int:
    rng = random.Random(seed)
    parts = [take_apart(data) for data in GOLDEN]
    read = 0
    for _ in range(count):
        header, index, sections = rng.choice(parts)
        kind = rng.randrange(4)
        if kind == 0:
            header = mutate(json.dumps(header, separators=(",", ":")).encode(), rng)
        elif kind == 1:
            index = mutate(index, rng)
        else:
            for _ in range(kind):
                header = mutate_json(header, rng)
        try:
            load_raw(read_container(assemble(header, index, sections), verify=False))
            read += 1
        except FormatError:
            continue
    return read


def test_damage_is_always_noticed():
    damage_campaign(2_000, seed=1)


@pytest.mark.slow
@pytest.mark.long
def test_damage_is_always_noticed_in_a_long_campaign():
    damage_campaign(100_000, seed=2)


def test_hostile_files_are_read_or_refused():
    assert (
        hostile_campaign(2_000, seed=3) > 100
    )  # or the mutations are too crude to get behind the first checks


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(1800)
def test_hostile_files_are_read_or_refused_in_a_long_campaign():
    assert hostile_campaign(100_000, seed=4) > 5_000


@pytest.mark.parametrize("data", GOLDEN, ids=["base", "delta"])
def test_no_flipped_bit_passes(data):
    for position in range(len(data)):
        mutated = bytearray(data)
        mutated[position] ^= 1 << position % 8
        assert is_refused(bytes(mutated)), position


def test_no_single_bit_of_a_small_file_passes():
    data = GOLDEN[1]
    for position in range(8 * len(data)):
        mutated = bytearray(data)
        mutated[position // 8] ^= 1 << position % 8
        assert is_refused(bytes(mutated)), position


@pytest.mark.parametrize("data", GOLDEN, ids=["base", "delta"])
def test_no_truncation_passes(data):
    assert all(is_refused(data[:length]) for length in range(len(data)))


@given(st.binary(max_size=300), st.booleans())
def test_random_bytes_are_refused(data, with_magic):
    assert is_refused(MAGIC + data if with_magic else data)
