import dataclasses
import hashlib
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shrinkpoint.errors import CorruptionError, FormatError, UnsupportedFormatError
from shrinkpoint.store.manifest import MAX_CHAIN, MAX_MANIFEST_BYTES, BlobRef, Manifest, seal, unseal

SESSION = "0123456789abcdef"


def ref(step: int = 7, number: int = 0, session: str = SESSION) -> BlobRef:
    return BlobRef(key=f"data/{step:012d}-{session}-{number:016x}.shrink", size=3, sha256="ab" * 32)


def manifest(**changes: Any) -> Manifest:
    values: dict[str, Any] = {
        "seq": 4,
        "epoch": 2,
        "session": SESSION,
        "step": 7,
        "kind": "delta",
        "chain": (ref(6), ref(7)),
        "parent_digest": "cd" * 32,
        "state_digest": "xyz",
        "wall_time": 12.5,
        "library": "shrinkpoint 0",
        "meta": {"loss": 2.5, "name": "grüße", "deep": [{"a": None}, True]},
    }
    return Manifest(**{**values, **changes})


def record() -> dict[str, Any]:
    return unseal(manifest().to_bytes(), "m")


def test_round_trip() -> None:
    original = manifest()
    copy = Manifest.from_bytes(original.to_bytes())
    assert copy == original
    assert copy.to_bytes() == original.to_bytes()
    assert copy.digest == original.digest == original.to_bytes()[-65:-1].decode()
    assert hash(copy) == hash(original)
    assert copy.stored_bytes == 6


def test_every_bit_flip_is_detected() -> None:
    data = manifest().to_bytes()
    for position in range(len(data)):
        for bit in range(8):
            damaged = bytearray(data)
            damaged[position] ^= 1 << bit
            with pytest.raises(CorruptionError):
                Manifest.from_bytes(bytes(damaged))


def test_every_truncation_and_extension_is_detected() -> None:
    data = manifest().to_bytes()
    for length in range(len(data)):
        with pytest.raises(CorruptionError):
            Manifest.from_bytes(data[:length])
    with pytest.raises(CorruptionError):
        Manifest.from_bytes(data + b"\n")


@pytest.mark.parametrize(
    "changes",
    [
        {"seq": -1},
        {"seq": 10**10},
        {"seq": True},
        {"seq": 1.0},
        {"epoch": 0},
        {"session": "0123456789ABCDEF"},
        {"session": "../../../../etc/"},
        {"step": -1},
        {"step": 8},  # the last key says 7
        {"kind": "full"},
        {"kind": "base"},  # with a chain of two
        {"chain": ()},
        {"chain": (ref(7),)},  # a delta of one
        {"chain": (ref(7), ref(7))},
        {"chain": tuple(ref(7, n) for n in range(MAX_CHAIN + 1))},
        {"parent_digest": None},
        {"parent_digest": "CD" * 32},
        {"state_digest": 5},
        {"wall_time": float("nan")},
        {"wall_time": "now"},
        {"library": None},
        {"meta": []},
    ],
)
def test_fields_out_of_range(changes: dict[str, Any]) -> None:
    with pytest.raises(FormatError):
        manifest(**changes)


@pytest.mark.parametrize(
    "key",
    [
        "data/../../etc/passwd",
        "/data/000000000007-0123456789abcdef-0000000000000000.shrink",
        "s3://b/data/000000000007-0123456789abcdef-0000000000000000.shrink",
        "data/000000000007-0123456789abcdef-0000000000000000.shrink\n",
        "data/00000000000٧-0123456789abcdef-0000000000000000.shrink",
        "data/000000000007-0123456789abcdef-0000000000000000.shrink/../x",
        "commits/0000000000.json",
        "",
    ],
)
def test_keys_that_lead_out_of_the_run(key: str) -> None:
    with pytest.raises(FormatError):
        BlobRef(key=key, size=1, sha256="ab" * 32)
    hostile = record()
    hostile["chain"][0]["key"] = key
    with pytest.raises(FormatError):
        Manifest.from_bytes(seal(hostile))


@pytest.mark.parametrize("size", [-1, 2**63, 1.5, "1", None, True])
def test_sizes_out_of_range(size: Any) -> None:
    with pytest.raises(FormatError, match="size"):
        BlobRef(key=ref().key, size=size, sha256="ab" * 32)


def test_unknown_fields_are_ignored_and_kept_in_the_digest() -> None:
    data = seal({**record(), "from_the_future": 1})
    read = Manifest.from_bytes(data)
    assert read == manifest()
    assert read.to_bytes() == data
    assert read.digest != manifest().digest
    assert dataclasses.replace(read, seq=5).to_bytes() == manifest(seq=5).to_bytes()


@pytest.mark.parametrize("changes", [{"format": 2}, {"reader_features": ["telepathy"]}])
def test_newer_versions_are_refused_by_name(changes: dict[str, Any]) -> None:
    changed = {**record(), **changes}
    del changed["state_digest"]  # another version may have other fields
    with pytest.raises(UnsupportedFormatError, match=r"shrinkpoint 0.*upgrade"):
        Manifest.from_bytes(seal(changed), "commits/x")


@pytest.mark.parametrize("name", sorted(record()))
def test_each_missing_field_is_a_format_error(name: str) -> None:
    changed = record()
    del changed[name]
    with pytest.raises(FormatError):
        Manifest.from_bytes(seal(changed))


@pytest.mark.parametrize("name", sorted(record()))
@pytest.mark.parametrize("value", [None, True, -1.5, "text", [], [[1]], {}, {"a": 1}])
def test_each_field_of_another_type_is_a_format_error(name: str, value: Any) -> None:
    changed = record()
    allowed = (
        (str,) if name == "parent_digest" else (int, float) if name == "wall_time" else (type(changed[name]),)
    )
    if (
        type(value) in allowed
        and (name, value) not in [("chain", []), ("chain", [[1]])]
        and value is not True
    ):
        return
    changed[name] = value
    with pytest.raises(FormatError):
        Manifest.from_bytes(seal(changed))


@pytest.mark.parametrize(
    "body",
    [b"[1]", b"null", b"{", b"", b"[" * 100_000, b'{"a": NaN}', b'{"a": 1e999}x', b"\xff", b"9" * 10_000],
)
def test_hostile_bodies_with_a_right_checksum(body: bytes) -> None:
    data = body + b"\n" + hashlib.sha256(body).hexdigest().encode() + b"\n"
    with pytest.raises(FormatError):
        Manifest.from_bytes(data)


def test_size_limit_comes_before_parsing() -> None:
    with pytest.raises(FormatError, match="at most"):
        unseal(b"[" * (MAX_MANIFEST_BYTES + 1), "m")
    with pytest.raises(FormatError, match="less in meta"):
        manifest(meta={"x": "y" * MAX_MANIFEST_BYTES}).to_bytes()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), object(), b"bytes", {1, 2}])
def test_meta_that_is_not_finite_json(value: object) -> None:
    with pytest.raises(FormatError, match="meta"):
        manifest(meta={"x": value}).to_bytes()


@given(st.binary(max_size=300))
def test_arbitrary_bytes_only_ever_raise_format_errors(data: bytes) -> None:
    with pytest.raises(FormatError):
        Manifest.from_bytes(data)


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False) | st.text(),
        lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    )
)
def test_meta_round_trips(value: Any) -> None:
    try:
        json.dumps(value, allow_nan=False)
    except ValueError:
        return
    assert Manifest.from_bytes(manifest(meta={"v": value}).to_bytes()).meta == {"v": value}


@pytest.mark.parametrize("number", ["1" + "0" * 400, "-1" + "0" * 400, str(2**63), "1e400"])
@pytest.mark.parametrize("where", ["wall_time", "meta"])
def test_sealed_numbers_that_overflow_are_refused(where: str, number: str) -> None:
    body = manifest(meta={"x": 12.5}).to_bytes().split(b"\n")[0]
    old = b'"wall_time":12.5' if where == "wall_time" else b'"x":12.5'
    assert body.count(old) == 1
    body = body.replace(old, old.replace(b"12.5", number.encode()))
    sealed = body + b"\n" + hashlib.sha256(body).hexdigest().encode() + b"\n"
    with pytest.raises(FormatError, match=r"64 bits|out of range"):
        Manifest.from_bytes(sealed, "m")


@pytest.mark.parametrize("wall_time", [10**400, -(10**400)])
def test_a_clock_that_overflows_is_refused(wall_time: int) -> None:
    with pytest.raises(FormatError, match="wall_time"):
        manifest(wall_time=wall_time)
