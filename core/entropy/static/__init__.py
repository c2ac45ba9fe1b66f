"""Coders with one static table or none: rANS, Huffman and runs."""
