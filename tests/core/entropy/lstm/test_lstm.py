import os
import subprocess
import sys
import tracemalloc
import zlib
from contextlib import nullcontext
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.payloads import check_survives, check_truncations, damaged, damages
from support.teams import in_team

from shrinkpoint.entropy.lstm import coder as lstm
from shrinkpoint.entropy.lstm.coder import (
    LstmOptions,
    decode_plane,
    encode_plane,
    uses_previous,
)
from shrinkpoint.entropy.static.rans import encode_symbols
from shrinkpoint.errors import ConfigError, CorruptionError, FormatError

SMALL = LstmOptions(width=8, rate=4)
NEVER = mock.patch.object(lstm, "encode_given", return_value=(bytes(1 << 20), False))
"""Within it every plane is coded by the network, also those for which it does not pay: those of fast tests."""
Case = tuple[np.ndarray, int, int, np.ndarray | None]
few = settings(deadline=None, max_examples=40)  # the first example compiles the kernels


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Planes of any shape, alphabet and skew, which the previous plane explains well, hardly or not at all."""
    alphabet = draw(st.sampled_from([1, 2, 5, 16, 256]))
    columns = draw(st.sampled_from([1, 2, 7, 40, 300]))
    rows = draw(st.sampled_from([0, 1, 2, 8, 50]))
    rng = np.random.default_rng(draw(st.integers(0, 1 << 32)))
    symbols = rng.integers(0, draw(st.integers(1, alphabet)), rows * columns).astype(np.uint8)
    symbols[rng.random(symbols.size) < draw(st.sampled_from([0.0, 0.9, 1.0]))] = alphabet - 1
    if draw(st.booleans()):
        return symbols, alphabet, columns, None
    changed = rng.random(symbols.size) < draw(st.sampled_from([0.0, 0.05, 1.0]))
    previous = np.where(changed, rng.integers(0, alphabet, symbols.size), symbols)
    return symbols, alphabet, columns, previous.astype(np.uint8)


@few
@given(
    case=cases(),
    forced=st.booleans(),
    width=st.sampled_from([4, 8, 12]),
    rate=st.sampled_from([3, 5, 12]),
    chunk=st.sampled_from([8, 9, 18]),
)
def test_round_trip(case: Case, forced: bool, width: int, rate: int, chunk: int) -> None:
    symbols, alphabet, columns, previous = case
    options = LstmOptions(width=width, rate=rate, chunk=chunk)
    with NEVER if forced and symbols.size >= 256 and len(set(symbols)) > 1 else nullcontext():
        payload = encode_plane(symbols, alphabet, columns=columns, previous=previous, options=options)
    if payload[:1] in (b"\0", b"\1"):
        assert len(payload) <= 1 + len(encode_symbols(symbols, None, alphabet, 1))
    given_it = previous if uses_previous(payload) else None
    decoded = decode_plane(payload, symbols.size, alphabet, columns=columns, previous=given_it)
    np.testing.assert_array_equal(decoded, symbols)
    assert decoded.dtype == np.uint8


def shifted(rows: int, columns: int, alphabet: int) -> tuple[np.ndarray, np.ndarray]:
    """A plane that follows from the symbol above and the one to the left in the previous plane, mostly; integers alone."""
    i, j = np.indices((rows, columns), dtype=np.int64)
    previous = (i * 7919 + j * 104729 + i * j % 1013 * 31) % 8191 * alphabet >> 13
    padded = np.pad(previous, 1)
    plane = (padded[:-2, 1:-1] + padded[1:-1, :-2]) // 2
    odd = (i * 31 + j * 17 + i * j % 7) % 16 == 0
    plane = np.where(odd, (i + j) % alphabet, plane)
    return plane.astype(np.uint8).reshape(-1), previous.astype(np.uint8).reshape(-1)


def test_chunks_do_not_depend_on_threads() -> None:
    plane, previous = shifted(60, 120, 4)
    options = LstmOptions(width=8, rate=4, chunk=11)
    with NEVER:
        one, two = (
            in_team(n, lambda: encode_plane(plane, 4, columns=120, previous=previous, options=options))
            for n in (1, 2)
        )
    assert one == two
    assert one[0] == 3
    for threads in (1, 2):
        decoded = in_team(threads, lambda: decode_plane(one, plane.size, 4, columns=120, previous=previous))
        np.testing.assert_array_equal(decoded, plane)


GOLDEN = (
    "0303040a0c0813b401610ebba90a2577cdf2a38702f91c3e8e0121421b983b765a8af227aca030b817a124ff62061f3996e7"
    "6f175d6c957b2ae7d87dbe1a416b5451dab8300117df1c0949bb8de8c26541a74b28be5230ae45a5376b122a522668c5a9a1"
    "be3655be1176b88e8b53ff5c23cded4d87020f65d37e9ca5697644810f388df1e2446e09724e49595b1981e9ae7cad032e6a"
    "cf825ce51853e01c06172009eea356a9138de63420bc4d6815efd1f5f72e1fdd43f4b46fb547b4c82d8dad93e0ce850b86d5"
    "41d9587d885a55f0f00abca359e9501ab2d545ef655ebe508b8964f73d3c20f27b4b8477ed66b58da8297eeaeba82f204d79"
    "17e7be70b4dc1d6984b7efb74d160be4a1fef5900a50adfab2b58c0f2726f2bd6c7a007a"
)


def test_golden_payload() -> None:
    """Stored checkpoints hold such payloads: the bytes decode to the same plane for ever."""
    plane, previous = shifted(50, 30, 3)
    options = LstmOptions(width=12, rate=4, chunk=10)
    with NEVER:
        assert encode_plane(plane, 3, columns=30, previous=previous, options=options).hex() == GOLDEN
    decoded = decode_plane(bytes.fromhex(GOLDEN), plane.size, 3, columns=30, previous=previous)
    np.testing.assert_array_equal(decoded, plane)


@pytest.mark.slow
def test_other_vector_units_make_the_same_bytes(tmp_path) -> None:
    """Compiled for the oldest processor that numba knows, without the vector units of this one."""
    environment = {**os.environ, "NUMBA_CPU_NAME": "generic", "NUMBA_CPU_FEATURES": "", "NUMBA_OPT": "1"}
    environment |= {"NUMBA_CACHE_DIR": str(tmp_path)}
    program = (
        "import sys, numpy as np; from shrinkpoint.entropy.lstm import coder; from shrinkpoint.entropy.lstm.coder import *\n"
        "coder.encode_given = lambda *_: (bytes(1 << 20), False)\n"
        "rng = np.random.default_rng(0); previous = rng.integers(0, 4, 3000).astype(np.uint8)\n"
        "plane = np.where(rng.random(3000) < 0.1, 0, previous).astype(np.uint8)\n"
        "payload = encode_plane(plane, 4, columns=100, previous=previous, options=LstmOptions(width=16, rate=4))\n"
        "sys.stdout.write(payload.hex())"
    )
    run = [sys.executable, "-c", program]
    there = subprocess.run(run, env=environment, capture_output=True, text=True, check=True).stdout
    here = subprocess.run(run, capture_output=True, text=True, check=True).stdout
    assert there == here
    assert here.startswith("03")


def test_what_does_not_decode_is_never_written(monkeypatch: pytest.MonkeyPatch) -> None:
    plane, previous = shifted(60, 50, 3)
    real = lstm._Plan.code

    def faulty(self, offset, symbols, stream, decoding):
        used = real(self, offset, symbols, stream, decoding)
        if decoding:
            symbols[-1] ^= 1
        return used

    monkeypatch.setattr(lstm._Plan, "code", faulty)
    payload = encode_plane(plane, 3, columns=50, previous=previous, options=SMALL)
    monkeypatch.undo()
    with NEVER:
        assert encode_plane(plane, 3, columns=50, previous=previous, options=SMALL)[0] == 3
    assert payload[0] in (0, 1)
    np.testing.assert_array_equal(decode_plane(payload, plane.size, 3, columns=50, previous=previous), plane)


def sample() -> tuple[np.ndarray, np.ndarray, bytes]:
    plane, previous = shifted(40, 40, 3)
    options = LstmOptions(width=4, rate=4, chunk=10)
    with NEVER:
        return plane, previous, encode_plane(plane, 3, columns=40, previous=previous, options=options)


@few
@given(
    payload=st.binary(max_size=60), prefix=st.sampled_from(["", "00", "01", "02020408", "0302040810101001"])
)
def test_any_bytes(payload: bytes, prefix: str) -> None:
    previous = (np.arange(600) % 3).astype(np.uint8)
    check_survives(
        lambda data: decode_plane(data, 600, 3, columns=30, previous=previous),
        bytes.fromhex(prefix) + payload,
        600,
        3,
    )


@few
@given(changes=damages())
def test_damage_is_noticed(changes: list[tuple[int, int]]) -> None:
    plane, previous, payload = sample()
    assert payload[0] == 3
    changed = damaged(payload, changes)
    if changed[1:2] != payload[1:2]:
        changed = changed[:1] + bytes([min(changed[1], 4)]) + changed[2:]  # wide networks take their time
    if changed == payload:
        return
    try:
        decoded = decode_plane(changed, plane.size, 3, columns=40, previous=previous)
    except FormatError:
        return
    np.testing.assert_array_equal(decoded, plane)  # a changed rate or rarity may matter to no symbol


def test_truncated_payloads() -> None:
    plane, previous, payload = sample()
    check_truncations(
        lambda data: decode_plane(data, plane.size, 3, columns=40, previous=previous), payload, plane.size
    )


def test_another_previous_plane_is_noticed() -> None:
    plane, previous, payload = sample()
    with pytest.raises(CorruptionError, match="checksum"):
        decode_plane(payload, plane.size, 3, columns=40, previous=previous[::-1].copy())
    with pytest.raises(FormatError, match="there is none"):
        decode_plane(payload, plane.size, 3, columns=40)


HEAD = "0202040a000000"


@pytest.mark.parametrize(
    ("payload", "message"),
    [
        ("", "1 bytes expected"),
        ("04", "unknown mode 4"),
        ("01", "there is none"),
        ("0200040a", "width must be an integer"),
        ("02ff040a", "width must be an integer"),
        ("0202020a", "rate must be an integer"),
        ("02020418", "3 bytes expected"),
        ("02020419", "chunk must be an integer"),
        ("0202040a0000a1", "rarity of 161"),
        (HEAD, "too few for 2 chunks"),
        (HEAD + "7f" + "00" * 20, "chunk length is 127"),
        (HEAD + "03" + "00" * 20, "4 bytes expected"),
        (HEAD + "05" + "00" * 12, "checksum"),
    ],
)
def test_malformed_payloads(payload: str, message: str) -> None:
    with pytest.raises(FormatError, match=message):
        decode_plane(bytes.fromhex(payload), 2000, 3, columns=50)


def test_bytes_behind_the_code_are_refused() -> None:
    stream = bytes(100)
    checksum = zlib.crc32(bytes(256)).to_bytes(4, "little")
    with pytest.raises(CorruptionError, match="100 bytes, of which"):
        decode_plane(bytes.fromhex("0202040800a0a0") + checksum + stream, 256, 3, columns=1)


def test_a_plane_that_the_payload_cannot_hold_takes_no_memory() -> None:
    payload = bytes.fromhex("02020408000000") + bytes(50)
    tracemalloc.start()
    with pytest.raises(FormatError, match="too few for"):
        decode_plane(payload, 1 << 28, 3, columns=1 << 10)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1 << 20


@pytest.mark.parametrize(
    "wrong",
    [{"width": 6}, {"width": 0}, {"width": 1024}, {"rate": 2}, {"rate": 1.5}, {"chunk": 7}, {"chunk": True}],
)
def test_options_are_checked(wrong: dict) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        LstmOptions(**wrong)
