"""Communication of flat tensors between ranks."""
