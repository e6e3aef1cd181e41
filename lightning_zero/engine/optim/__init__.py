"""PyTorch's optimizers on segments: flat, deferred and streamed steps."""
