"""Saving and loading of engine state."""
