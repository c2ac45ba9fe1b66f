"""A write-ahead log of the inputs of every optimizer step, its replay after a crash, and when it pays
(docs/steps.md)."""
