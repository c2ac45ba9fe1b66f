"""A log of what every optimizer step consumed, and its replay; when it pays (docs/steps.md)."""
