"""Shards and parity: whatever m of k + m are lost, the bytes come back; and any damage is noticed."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shrinkpoint.errors import CorruptionError, FormatError
from shrinkpoint.store.striped import parity
from shrinkpoint.store.striped.parity import parity_of, rebuild
from shrinkpoint.store.striped.shards import (
    BLOCK,
    Geometry,
    ShardName,
    block_sums,
    cut_data,
    encode_shard,
    sound_blocks,
)

KEY = "data/000000000001-0123456789abcdef-0123456789abcdef.shrink"


def payload(length: int) -> bytes:
    return np.random.default_rng(length).integers(0, 256, length, np.uint8).tobytes()


def files_of(geometry: Geometry, data: bytes) -> list[bytes]:
    cut = cut_data(geometry, data)
    return [encode_shard(ShardName(KEY, geometry, place), cut) for place in range(geometry.shards)]


def joined(geometry: Geometry, shards: list[parity.Shard]) -> bytes:
    return b"".join(shard.tobytes() for shard in shards)[: geometry.length]


def payloads_of(geometry: Geometry, data: bytes) -> list[parity.Shard]:
    files = files_of(geometry, data)
    assert all(len(file) == geometry.file_bytes for file in files)
    return [np.frombuffer(file, np.uint8)[geometry.header_bytes :] for file in files]


@given(
    st.integers(1, 12).flatmap(lambda k: st.tuples(st.just(k), st.integers(0, 2))),
    st.integers(0, 5000),
    st.data(),
)
def test_any_m_of_k_plus_m_are_restored(cut: tuple[int, int], length: int, data: st.DataObject) -> None:
    k, spare = cut
    geometry = Geometry(k, spare, length)
    content = payload(length)
    shards = payloads_of(geometry, content)
    kept = data.draw(st.sets(st.integers(0, k + spare - 1), min_size=k, max_size=k + spare))
    assert joined(geometry, rebuild({i: shards[i] for i in kept}, k, spare)) == content


@pytest.mark.parametrize("k", [1, 2, 3, 7, 30])
def test_every_pair_of_losses(k: int) -> None:
    geometry = Geometry(k, 2, 1003)
    content = payload(1003)
    shards = payloads_of(geometry, content)
    for lost in itertools.combinations(range(k + 2), 2):
        found = {i: shard for i, shard in enumerate(shards) if i not in lost}
        assert joined(geometry, rebuild(found, k, 2)) == content


def test_one_more_loss_is_an_error() -> None:
    for k, spare in [(1, 1), (2, 0), (3, 1), (4, 2)]:
        shards = dict(enumerate(payloads_of(Geometry(k, spare, 999), payload(999))))
        for lost in itertools.combinations(range(k + spare), spare + 1):
            with pytest.raises(CorruptionError, match="shards"):
                rebuild({i: shard for i, shard in shards.items() if i not in lost}, k, spare)


def test_q_is_the_sum_with_powers_of_two(monkeypatch: pytest.MonkeyPatch) -> None:
    """Against the definition, byte by byte, over several chunks."""
    monkeypatch.setattr(parity, "_CHUNK", 64)
    shards = [np.frombuffer(payload(400 + 8 * i)[:400], np.uint8) for i in range(5)]

    def times_two(value: int, count: int) -> int:
        for _ in range(count):
            value = value << 1 ^ (0x11D if value & 0x80 else 0)
        return value

    wanted = [0] * 400
    for i, shard in enumerate(shards):
        wanted = [total ^ times_two(int(byte), i) for total, byte in zip(wanted, shard, strict=True)]
    assert parity_of(shards, 1).tolist() == wanted


@given(st.integers(1, 4), st.integers(0, 2), st.integers(1, 400), st.data())
def test_any_damage_is_noticed(k: int, spare: int, length: int, data: st.DataObject) -> None:
    geometry = Geometry(k, spare, length)
    files = files_of(geometry, payload(length))
    place = data.draw(st.integers(0, k + spare - 1))
    position = data.draw(st.integers(0, geometry.file_bytes - 1))
    flipped = data.draw(st.integers(1, 255))
    damaged = bytearray(files[place])
    damaged[position] ^= flipped
    name, header = ShardName(KEY, geometry, place), bytes(damaged[: geometry.header_bytes])
    if position < geometry.header_bytes:
        with pytest.raises(CorruptionError, match=r"\.shrink\."):
            block_sums(name, header)
    else:
        blocks = sound_blocks(block_sums(name, header), bytes(damaged[geometry.header_bytes :]))
        assert blocks == [None]


def test_one_block_of_many() -> None:
    geometry = Geometry(1, 0, 2 * BLOCK + 10)
    file = bytearray(files_of(geometry, payload(geometry.length))[0])
    file[geometry.header_bytes + BLOCK] ^= 1
    sums = block_sums(ShardName(KEY, geometry, 0), bytes(file[: geometry.header_bytes]))
    blocks = sound_blocks(sums, bytes(file[geometry.header_bytes :]))
    assert [block is not None for block in blocks] == [True, False, True]


def test_a_shard_in_anothers_place_is_none() -> None:
    geometry = Geometry(2, 1, 100)
    first = files_of(geometry, payload(100))[0]
    for other in (ShardName(KEY, geometry, 1), ShardName(KEY.replace("01-", "02-", 1), geometry, 0)):
        with pytest.raises(CorruptionError):
            block_sums(other, first[: geometry.header_bytes])


def test_names_come_back() -> None:
    for geometry in (Geometry(1, 0, 0), Geometry(1, 31, 65535), Geometry(4, 2, 10**12)):
        name = ShardName(KEY, geometry, geometry.shards - 1)
        assert ShardName.parse(str(name)) == name


@pytest.mark.parametrize(
    "suffix",
    [
        "",
        ".2+1.0",
        ".0+1.0.10",
        ".2+1.3.10",
        ".2+3.0.10",
        ".02+1.0.10",
        ".2+1.0.010",
        ".2+1.-1.10",
        ".31+2.0.10",
        ".2+1.0.9223372036854775808",
        ".2+1.0.99999999999999999999",
        ".2+1.0.10/x",
        ".2+1.0.10.tmp",
        ".².0.10",
    ],
)
def test_hostile_names_are_none(suffix: str) -> None:
    assert ShardName.parse(KEY + suffix) is None


def test_other_keys_are_no_shards() -> None:
    for key in ("commits/0000000000.json", "data/x.shrink.2+1.0.10", f"../{KEY}.2+1.0.10"):
        assert ShardName.parse(key) is None


@pytest.mark.parametrize(("k", "spare"), [(0, 1), (33, 0), (2, 3), (1, -1)])
def test_impossible_geometries(k: int, spare: int) -> None:
    with pytest.raises(FormatError):
        Geometry(k, spare, 10)
