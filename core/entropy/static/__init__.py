"""Coders with static tables: rANS and Huffman."""
