"""Several object stores as one, of which some may be lost: shards with parity, and records on a majority (docs/stores.md)."""
