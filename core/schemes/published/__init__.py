"""Other published checkpoint compression schemes, for comparison."""
