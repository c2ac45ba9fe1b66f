"""How each kind of scheme is chosen and bounded: by a search, or as the user set it."""
