"""States to containers and back: which codec each tensor gets, in which order, with which references."""
