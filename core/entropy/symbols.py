"""Checking, counting and measuring symbol arrays before they are coded."""

import numpy as np

from shrinkpoint.arrays import Int64s, UInt8s

__all__ = [
    "check_array",
    "check_sizes",
    "context_view",
    "count_symbols",
    "frozen",
]


_FEW_CELLS = 1 << 11  # four tables of more do not stay in the cache, and are hardly hit twice in a row
_NO_CONTEXT = np.zeros(1, dtype=np.uint8)


def frozen(array: UInt8s) -> UInt8s:
    """A contiguous read-only view: one array type for the kernels, hence one compilation for all callers."""
    view = np.ascontiguousarray(array).view()
    view.flags.writeable = False
    return view


def context_view(contexts: UInt8s | None, start: int, stop: int) -> tuple[UInt8s, int]:
    """What kernels read as contexts of symbols start..stop: their slice and step 1, or one zero and step 0."""
    if contexts is None:
        return frozen(_NO_CONTEXT), 0
    return frozen(contexts[start:stop]), 1


def check_array(array: UInt8s, name: str, count: int | None = None) -> None:
    """Raise ValueError unless ``array`` is uint8 and 1-D, with ``count`` elements where that is given."""
    if array.dtype != np.uint8 or array.ndim != 1:
        raise ValueError(
            f"{name} must be a 1-D uint8 array, got {array.ndim}-D {array.dtype}: flatten and cast it"
        )
    if count is not None and array.size != count:
        raise ValueError(f"{name} must have {count} elements, one per symbol, got {array.size}")


def check_sizes(alphabet: int, n_contexts: int) -> None:
    """Raise ValueError unless both fit a byte."""
    if not 1 <= alphabet <= 256:
        raise ValueError(f"alphabet must be 1..256, got {alphabet}")
    if not 1 <= n_contexts <= 256:
        raise ValueError(f"n_contexts must be 1..256, got {n_contexts}")


def count_symbols(symbols: UInt8s, contexts: UInt8s | None, alphabet: int, n_contexts: int) -> Int64s:
    """Count each symbol in each context.

    Args:
        symbols: uint8 (n,), each below ``alphabet``.
        contexts: uint8 (n,), each below ``n_contexts``; None puts all symbols into context 0.
        alphabet: 1..256.
        n_contexts: 1..256.

    Returns:
        int64 (n_contexts, alphabet).

    Raises:
        ValueError: a symbol or context is out of range, or an array has the wrong shape or dtype.
    """
    from shrinkpoint.entropy import table_kernels  # numba

    check_sizes(alphabet, n_contexts)
    check_array(symbols, "symbols")
    if contexts is not None:
        check_array(contexts, "contexts", symbols.size)
    cells = n_contexts * alphabet
    lanes = 1 if cells > min(_FEW_CELLS, symbols.size // 4) else 4
    counts = np.zeros((lanes, cells), dtype=np.int64)
    view, step = context_view(contexts, 0, symbols.size)
    if not table_kernels.count_pairs(frozen(symbols), view, step, alphabet, counts):
        raise ValueError(f"every symbol must be below {alphabet} and every context below {n_contexts}")
    return np.asarray(counts.sum(axis=0).reshape(n_contexts, alphabet), dtype=np.int64)
