"""The processes that train together: groups of them, messages between their background threads, and how they end together."""
