"""Adapters of the engine to PyTorch Lightning."""
