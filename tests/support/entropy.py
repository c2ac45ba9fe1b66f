"""How many bits symbols need."""

from shrinkpoint.arrays import UInt8s
from shrinkpoint.entropy.static.tables import count_symbols, data_bits


def conditional_entropy_bits(
    symbols: UInt8s, contexts: UInt8s | None, alphabet: int = 256, n_contexts: int = 256
) -> float:
    """Bits of an ideal coder that knows the frequencies in each context: n * H(symbol | context), without tables."""
    return float(data_bits(count_symbols(symbols, contexts, alphabet, n_contexts)).sum())
