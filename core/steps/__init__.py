"""A write-ahead log of the inputs of every optimizer step, and its replay after a crash (core/steps/FORMAT.md)."""
