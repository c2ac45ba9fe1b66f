"""The lossless scheme: bit planes predicted from the previous checkpoint and from siblings."""
