"""Quantizers: sketches, k-means codebooks, subtractive dither, the Viterbi search of trellis-coded quantization."""
