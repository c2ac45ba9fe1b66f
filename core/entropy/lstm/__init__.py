"""The LSTM coder of the ITMO scheme."""
