"""Schedules of pipeline stages, the cost of layers, streams of random numbers."""
