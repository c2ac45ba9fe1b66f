"""What tables and data take, and which contexts share one."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shrinkpoint.entropy.static import table_kernels
from shrinkpoint.entropy.static.tables import data_bits


def counts_of(seed, contexts, alphabet, kinds):
    generator = np.random.default_rng(seed)
    shares = generator.dirichlet(np.full(alphabet, 0.2), kinds)
    rows = [generator.multinomial(generator.integers(1, 5000), shares[i % kinds]) for i in range(contexts)]
    return np.array(rows, dtype=np.int64)


@given(st.integers(0, 2**32 - 1), st.integers(1, 20), st.integers(2, 60))
def test_bits_of_data_and_tables(seed, contexts, alphabet):
    counts = counts_of(seed, contexts, alphabet, 3)
    labels = np.arange(contexts) % 3 if contexts >= 3 else np.zeros(contexts, dtype=np.int64)
    merged = np.zeros((int(labels.max()) + 1, alphabet), dtype=np.int64)
    bits = table_kernels.payload_bits(counts, labels, merged)
    assert np.array_equal(merged, [counts[labels == table].sum(axis=0) for table in range(len(merged))])
    present = np.count_nonzero(merged, axis=1)
    positions = np.where(present == alphabet, 0, np.minimum(present, (alphabet + 7) // 8))
    assert bits == pytest.approx(float(data_bits(merged).sum() + 8 * (1 + positions + present).sum()))


@given(st.integers(0, 2**32 - 1), st.integers(2, 100), st.integers(2, 60), st.integers(1, 4))
def test_contexts_of_one_kind_share_a_table(seed, contexts, alphabet, kinds):
    counts = counts_of(seed, contexts, alphabet, kinds)
    labels = np.arange(contexts)
    apart = table_kernels.payload_bits(counts, labels, np.zeros_like(counts))
    table_kernels.cluster(counts.copy(), labels)
    used, first = np.unique(labels, return_index=True)
    assert np.array_equal(used, np.arange(used.size))
    assert np.array_equal(first, np.sort(first))
    together = table_kernels.payload_bits(counts, labels, np.zeros((used.size, alphabet), dtype=np.int64))
    assert together <= apart + 1e-6
