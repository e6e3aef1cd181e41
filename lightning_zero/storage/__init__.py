"""Where shards sleep."""
