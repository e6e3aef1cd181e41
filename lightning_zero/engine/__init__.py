"""The partition engine: plain PyTorch, no Lightning."""
