"""The machine of a run: versions, devices, rates, working features."""
