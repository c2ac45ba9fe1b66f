"""Coders with one static table or none: rANS, Huffman, runs, bytes and residuals of bit patterns."""
