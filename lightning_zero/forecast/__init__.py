"""Forecasts of memory before a run."""
