"""The tests that need a GPU."""
