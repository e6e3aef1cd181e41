"""Configurations of other tools as options of this package, in plain Python."""
