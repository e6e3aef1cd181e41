"""Tensor parallelism: plans that cut a module's parameters over ranks, the cut itself, and its verification."""
