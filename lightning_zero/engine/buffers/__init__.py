"""One flat buffer: its values, gradients, step window, own range and disk state; the classes of parameters."""
