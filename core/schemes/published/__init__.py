"""Other published schemes, for comparison."""
