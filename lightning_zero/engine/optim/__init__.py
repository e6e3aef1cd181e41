"""PyTorch's optimizers on segments: flat, deferred, streamed and early steps."""
