"""Runs of a step on fakes, and modules of other stages that are passed over."""
