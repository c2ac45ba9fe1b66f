"""The file format of one checkpoint (docs/format.md)."""
