import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.entropy import conditional_entropy_bits
from support.payloads import untimed

from shrinkpoint.entropy.contexts.leaves import levelled, read_leaf_tables, write_leaf_tables
from shrinkpoint.entropy.tables import SCALE_BITS, TableSet, plan_tables, round_counts, write_tables
from shrinkpoint.entropy.wire import BitReader, BitWriter, ByteReader
from shrinkpoint.errors import FormatError


@st.composite
def countings(draw: st.DrawFn) -> np.ndarray:
    """How often symbols occur in leaves, each of which has some."""
    leaves, alphabet = draw(st.integers(1, 12)), draw(st.sampled_from([1, 2, 3, 7, 40, 256]))
    rng = np.random.default_rng(draw(st.integers(0, 1 << 32)))
    counts = rng.geometric(1 / draw(st.sampled_from([1.5, 30, 10**6])), (leaves, alphabet)) - 1
    counts[rng.random(counts.shape) < draw(st.sampled_from([0.0, 0.5, 0.95]))] = 0
    counts[np.arange(leaves), rng.integers(0, alphabet, leaves)] += 1
    return counts.astype(np.int64)


@untimed
@given(counts=countings())
def test_round_trip(counts: np.ndarray) -> None:
    zero = int(counts.sum(axis=0).argmax())
    tables = levelled(counts, plan_tables(counts).rows, zero)
    out = BitWriter()
    write_leaf_tables(out, tables, zero)
    reader = BitReader(ByteReader(out.to_bytes(), "a test"))
    found_zero, found = read_leaf_tables(reader, *counts.shape)
    reader.finish()
    assert found_zero == zero
    np.testing.assert_array_equal(found.rows, tables.rows)
    np.testing.assert_array_equal(found.codes, tables.codes)
    present = found.codes[found.rows] > 0
    assert present[counts > 0].all()
    assert ((found.entries() >> 32).sum(axis=1) == 1 << SCALE_BITS).all()


def test_few_bits_for_good_tables() -> None:
    """Less than half of what tables take that stand for themselves, and coding by them costs next to nothing more."""
    rng = np.random.default_rng(0)
    leaves = rng.integers(0, 16, 60_000)
    symbols = np.clip(np.rint(rng.normal(0, 0.2 + leaves / 30)) + 4, 0, 8).astype(np.uint8)
    counts = np.zeros((16, 9), np.int64)
    np.add.at(counts, (leaves, symbols), 1)
    plain, tables, out = bytearray(), plan_tables(counts), BitWriter()
    write_tables(plain, tables, np.ones(16, np.bool_))
    found = levelled(counts, tables.rows, 4)
    write_leaf_tables(out, found, 4)
    assert len(out) < 0.5 * 8 * len(plain)
    frequencies = (found.entries() >> 32)[found.rows]
    bits = -(counts * np.log2(np.maximum(frequencies, 1) / (1 << SCALE_BITS))).sum()
    assert bits < 1.003 * conditional_entropy_bits(symbols, found.rows[leaves].astype(np.uint8), 9, 16)


@pytest.mark.parametrize(
    "counts",
    [
        [[5 * 10**7, 5000, 500], [1, 8 * 10**6, 10], [0, 2 * 10**5, 300]],
        [[2**27 - 1, 2**20, 2**15], [1, 2**26, 10], [0, 2**20, 30]],
        [[2**31, 1, 0], [1, 2**31, 1], [0, 1, 2**31]],
        [[10**5, 10, 1], [10, 10**5, 1], [1, 10, 10**5]],
    ],
)
def test_no_leaf_spoils_the_tables_of_others(counts: list[list[int]]) -> None:
    """Nor does zero's code cost more than a thousandth of a bit where it hardly ever occurs."""
    given = np.array(counts, dtype=np.int64)
    rows = np.arange(given.shape[0])

    def cost(tables: TableSet) -> float:
        frequencies = np.maximum(tables.entries() >> 32, 1)
        return float(-(given * np.log2(frequencies / (1 << SCALE_BITS))).sum())

    apart = TableSet(rows=rows, codes=round_counts(given))
    assert cost(levelled(given, rows, 0)) < 1.05 * cost(apart) + 0.001 * given.sum() + 100


def bits(*fields: tuple[int, int]) -> BitReader:
    out = BitWriter()
    for value, width in fields:
        out.put(value, width)
    return BitReader(ByteReader(out.to_bytes(), "a test"))


@pytest.mark.parametrize(
    ("fields", "leaves", "alphabet", "message"),
    [
        ([(5, 3)], 1, 5, "zero is symbol 5 in an alphabet of 5"),
        ([(0, 2), (9, 8), (1, 1), (3, 2)], 4, 3, "names table 3 of 2"),
        ([(0, 2), (9, 8), (0, 9), (1, 2), (0, 1)], 1, 3, "-1 where a table has numbers up to 2"),
        ([(0, 2), (9, 8), (0, 9), (0, 1), (3, 3), (0, 1)], 1, 3, "3 where a table has numbers up to 2"),
        ([(0, 2), (9, 8), (0, 9), (0, 2), (0, 1), (0, 2)], 1, 3, "a table has no symbol"),
        ([(0, 2), (9, 8), (0, 9), (0, 2), (0, 1), (1, 2)], 1, 3, "-1 where a table has numbers up to 255"),
    ],
)
def test_malformed(fields: list[tuple[int, int]], leaves: int, alphabet: int, message: str) -> None:
    with pytest.raises(FormatError, match=message):
        read_leaf_tables(bits(*fields, (0, 64)), leaves, alphabet)
