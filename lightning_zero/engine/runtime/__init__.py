"""Hooks, the order of collectives, reductions."""
