"""Quantizers and what they are chosen by: sketches, codebooks, dither, the nearest path of a trellis, movement."""
