"""A training that is being saved: what every way in shares, own loops and frameworks alike."""
