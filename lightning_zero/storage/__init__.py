"""Storage for shards between their uses."""
