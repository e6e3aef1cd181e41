"""Measurements of speed, each behind a check that both sides compute the same."""
