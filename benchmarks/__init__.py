"""Measurements of speed, each behind a check that what is compared computes the same."""
