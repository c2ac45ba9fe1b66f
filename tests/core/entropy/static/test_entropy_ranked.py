import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shrinkpoint.entropy.static.huffman import (
    MAX_RANKS,
    decode_ranks,
    encode_ranks,
    rank_lengths,
)
from shrinkpoint.errors import FormatError


@given(st.lists(st.integers(0, 10**9), min_size=1, max_size=MAX_RANKS))
def test_lengths_are_those_of_a_complete_prefix_code(counts):
    lengths = rank_lengths(np.array(counts))
    if len(counts) == 1:
        assert lengths == [0]
    else:
        assert sum(2.0**-length for length in lengths) == 1
        cost = sum(c * n for c, n in zip(counts, lengths, strict=True))
        shares = np.array([c for c in counts if c]) / max(1, sum(counts))
        entropy = float(-(shares * np.log2(shares)).sum())
        assert entropy - 1e-6 <= cost / max(1, sum(counts)) <= entropy + 1 or len(shares) < 2


@given(st.integers(0, 99), st.integers(1, 12))
def test_arrays_round_trip_under_a_table_of_other_arrays(seed, kinds):
    generator = np.random.default_rng(seed)
    table = rank_lengths(generator.integers(0, 1000, kinds))
    ranks = np.concatenate([np.arange(kinds), generator.integers(0, kinds, 500)]).astype(np.int64)
    stream = encode_ranks(ranks, table)
    assert np.array_equal(decode_ranks(stream, ranks.size, table), ranks)


@pytest.mark.parametrize(
    "lengths", [None, [], [1], [1, 2], [1, 1, 1], [True, True], [41, 1], "ab", [0, 0], [1] * 33]
)
def test_wrong_tables_are_refused(lengths):
    with pytest.raises(FormatError):
        decode_ranks(b"\0" * 20, 100, lengths)


def test_wrong_streams_are_refused():
    stream = encode_ranks(np.array([0, 1, 2] * 50), [1, 2, 2])
    for wrong in (b"", stream[:-1], stream + b"\0"):
        with pytest.raises(FormatError):
            decode_ranks(wrong, 150, [1, 2, 2])
