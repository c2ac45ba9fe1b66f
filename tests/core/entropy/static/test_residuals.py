import hashlib
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.payloads import damaged, damages, untimed

from shrinkpoint.entropy.static.residuals import (
    ClassTable,
    Layout,
    Sources,
    class_widths,
    classes_of,
    decode_residuals,
    encode_residuals,
)
from shrinkpoint.errors import FormatError

CUTS = {8: (0, 2, 6), 16: (1, 5, 9, 14), 32: (17, 21, 22, 30), 64: (49, 51)}


def patterns(width: int, count: int, seed: int) -> np.ndarray:
    """Any bits, with runs of both zeros, of the extremes, and of close numbers."""
    rng = np.random.default_rng(seed)
    bits = rng.integers(0, 1 << 64, count, dtype=np.uint64)
    extremes = np.array([0, 1 << (width - 1), (1 << width) - 1, (1 << (width - 1)) - 1], dtype=np.uint64)
    bits[: count // 4] = rng.choice(extremes, count // 4)
    bits[count // 4 : count // 4 * 2] = np.uint64(1 << (width - 2)) + np.arange(count // 4, dtype=np.uint64)
    return bits.astype(f"u{width // 8}")


@st.composite
def cases(draw: st.DrawFn) -> tuple[np.ndarray, Layout, Sources, np.ndarray | None]:
    width = draw(st.sampled_from(list(CUTS)))
    rows, columns = draw(st.integers(1, 20)), draw(st.integers(2, 300))
    count, seed = rows * columns, draw(st.integers(0, 99))
    bits = patterns(width, count, seed)
    rng = np.random.default_rng(seed)
    previous = bits + rng.integers(0, 9, count).astype(bits.dtype)
    reach = 1 << (width - 2)
    sources = Sources(
        previous=draw(st.sampled_from([previous, patterns(width, count, seed + 1)])),
        sibling=patterns(width, count, seed + 2),
        rows=rng.integers(-reach, reach, rows),
        columns=rng.integers(-reach, reach, columns),
    )
    if draw(st.booleans()):
        sources = replace(sources, rows=np.array([draw(st.integers(-9, 9))]), columns=None)
    layout = Layout(
        width=width,
        cut=draw(st.sampled_from(CUTS[width])),
        magnitude=draw(st.booleans()),
        aligned=draw(st.booleans()),
        previous=draw(st.sampled_from([0, 1, 40, 64])),
        sibling=draw(st.sampled_from([0, 32, 64])),
    )
    contexts = rng.integers(0, 5, count).astype(np.uint8) if draw(st.booleans()) else None
    return bits, layout, sources, contexts


@untimed
@given(cases())
def test_every_bit_comes_back(case):
    bits, layout, sources, contexts = case
    sections = encode_residuals(bits, layout, sources, contexts)
    assert np.array_equal(decode_residuals(sections, bits.size, layout, sources, contexts), bits)


@untimed
@given(cases(), st.sampled_from(["classes", "symbols", "suffixes"]), damages(), st.integers(0, 1 << 20))
def test_damaged_sections_give_numbers_or_the_projects_own_error(case, name, changes, cut):
    bits, layout, sources, contexts = case
    sections = encode_residuals(bits, layout, sources, contexts)
    for hostile in (damaged(sections[name], changes), sections[name][: cut % (len(sections[name]) + 1)]):
        try:
            found = decode_residuals({**sections, name: hostile}, bits.size, layout, sources, contexts)
        except FormatError:
            continue
        assert (found.shape, found.dtype) == (bits.shape, bits.dtype)


def test_the_bytes_do_not_depend_on_threads():
    rng = np.random.default_rng(0)
    bits = rng.standard_normal(700_000, dtype=np.float32).view(np.uint32)
    previous = bits ^ rng.integers(0, 1 << 12, bits.size).astype(np.uint32)
    layout = Layout(width=32, cut=22, previous=64, aligned=True)
    sources = Sources(previous=previous)
    one, two = (encode_residuals(bits, layout, sources, None, threads) for threads in (1, 2))
    assert one == two
    assert np.array_equal(decode_residuals(two, bits.size, layout, sources, None, threads=2), bits)
    assert sum(map(len, one.values())) < 14 / 32 * bits.nbytes


def test_rows_go_on_across_chunks():
    bits = np.random.default_rng(0).standard_normal(600_000, dtype=np.float32).view(np.uint32)
    rng = np.random.default_rng(1)
    sources = Sources(rows=rng.integers(0, 1 << 24, 6), columns=rng.integers(0, 1 << 24, 100_000))
    layout = Layout(width=32, cut=21, magnitude=True)
    sections = encode_residuals(bits, layout, sources, None)
    assert np.array_equal(decode_residuals(sections, bits.size, layout, sources, None, threads=2), bits)


def test_numbers_equal_to_their_prediction_and_positive_zeros_have_no_suffix():
    previous = np.random.default_rng(0).standard_normal(5000, dtype=np.float32).view(np.uint32)
    bits = previous.copy()
    bits[:2000] = 0
    layout = Layout(width=32, cut=22, previous=64)
    sections = encode_residuals(bits, layout, Sources(previous=previous), None)
    assert sections["suffixes"] == b""
    assert len(sections["symbols"]) < 1000


@given(st.data())
def test_a_class_and_its_suffix_are_as_long_as_told(data):
    width = data.draw(st.sampled_from(list(CUTS)))
    layout = Layout(width=width, cut=data.draw(st.sampled_from(CUTS[width])))
    bits = patterns(width, 500, data.draw(st.integers(0, 99)))
    keys = classes_of(bits, layout, Sources()).astype(np.int64)
    table = ClassTable.of(layout, np.bincount(keys, minlength=layout.keys))
    if table.keys.size == 256:  # some numbers may be without a class
        return
    stored = int(class_widths(layout, keys).sum())
    assert len(encode_residuals(bits, layout, Sources(), None)["suffixes"]) == -(-stored // 8)


def test_classes_that_were_not_counted_escape():
    bits = np.zeros(1 << 18, dtype=np.uint32)
    bits[-1000:] = patterns(32, 1000, 3)  # beyond what is counted of a chunk
    layout = Layout(width=32, cut=22)
    sections = encode_residuals(bits, layout, Sources(), None)
    assert np.array_equal(decode_residuals(sections, bits.size, layout, Sources(), None), bits)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"width": 24}, "width must be"),
        ({"cut": 31}, "cut must be 17..30"),
        ({"cut": 16}, "cut must be 17..30"),
        ({"width": 64, "cut": 52}, "cut must be 49..51"),
        ({"previous": 65}, "previous must be 0..64"),
        ({"sibling": -1}, "sibling must be 0..64"),
    ],
)
def test_layouts_out_of_range(fields, message):
    with pytest.raises(ValueError, match=message):
        Layout(**{"width": 32, "cut": 21} | fields)


@pytest.mark.parametrize(
    ("fields", "sources"),
    [
        ({"previous": 64}, {}),
        ({"aligned": True}, {}),
        ({"sibling": 1}, {}),
        ({}, {"previous": np.zeros(9, np.uint32)}),
        ({}, {"previous": np.zeros(10, np.uint16)}),
        ({}, {"rows": np.zeros(2, np.int64)}),
        ({}, {"rows": np.zeros(2, np.int64), "columns": np.zeros(4, np.int64)}),
        ({}, {"rows": np.zeros(10, np.int64), "columns": np.zeros(1, np.int64)}),
    ],
)
def test_sources_that_do_not_fit(fields, sources):
    layout = Layout(width=32, cut=21, **fields)
    with pytest.raises(ValueError, match=r"predicted from|must"):
        encode_residuals(np.zeros(10, np.uint32), layout, Sources(**sources), None)


def test_a_huge_count_is_refused_before_any_memory_is_taken():
    sections = encode_residuals(np.zeros(10, np.uint32), Layout(width=32, cut=21), Sources(), None)
    with pytest.raises(FormatError, match="cannot hold"):
        decode_residuals(sections, 1 << 58, Layout(width=32, cut=21), Sources(), None)


@pytest.mark.parametrize(
    ("name", "payload"),
    [
        ("classes", b""),
        ("classes", b"\x01\x00"),
        ("classes", b"\x00\xff\xff\x03"),
        ("symbols", b""),
        ("symbols", b"\x02\x00\x00"),
        ("suffixes", b"\x00" * 99),
    ],
)
def test_malformed_sections(name, payload):
    layout = Layout(width=32, cut=21)
    sections = encode_residuals(patterns(32, 50, 0), layout, Sources(), None)
    with pytest.raises(FormatError):
        decode_residuals({**sections, name: payload}, 50, layout, Sources(), None)


GOLDEN = {
    (8, 2): "e2f61b46130f7a25",
    (16, 5): "f0456aa78a1a7f72",
    (32, 22): "2e56526f36b04f28",
    (64, 50): "e39e64904e8c83c4",
}


@pytest.mark.parametrize(("width", "cut"), GOLDEN)
def test_golden_bytes(width, cut):
    index = np.arange(3000, dtype=np.uint64)
    scattered = index * np.uint64(0x9E3779B97F4A7C15)
    bits = (scattered >> np.uint64(64 - width)).astype(f"u{width // 8}")
    bits[::7] = 0
    previous = bits + (index % np.uint64(5)).astype(bits.dtype)
    layout = Layout(width=width, cut=cut, previous=40, sibling=16, magnitude=True, aligned=True)
    sources = Sources(
        previous=previous, sibling=bits[::-1].copy(), rows=np.arange(30), columns=np.arange(100)
    )
    contexts = (index % np.uint64(3)).astype(np.uint8)
    sections = encode_residuals(bits, layout, sources, contexts)
    digest = hashlib.sha256(b"".join(sections[name] for name in sorted(sections))).hexdigest()[:16]
    assert digest == GOLDEN[width, cut]
    assert np.array_equal(decode_residuals(sections, bits.size, layout, sources, contexts), bits)
