"""Loops that train the same model under the engine and under DistributedDataParallel."""
