"""Coding matrices of integers, sixteen rows at a time."""
