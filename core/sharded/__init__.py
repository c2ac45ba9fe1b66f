"""States of which each rank of a training has a shard: gathered by tensor, coded whole, one checkpoint of all."""
