"""How a model is cut into stages, and state around the blocks that stages keep equal."""
