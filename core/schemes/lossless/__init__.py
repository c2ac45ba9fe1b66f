"""The scheme that changes nothing."""
