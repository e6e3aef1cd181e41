"""Whole parameters for users, checkpoints and statistics."""
