"""One flat buffer: its values, gradients, step window, own range and homes; the classes of parameters."""
