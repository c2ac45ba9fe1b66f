"""The search for the smallest configuration whose measured degradation stays within the bound."""
