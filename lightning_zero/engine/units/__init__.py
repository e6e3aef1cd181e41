"""Units: how they are chosen, where they lie, their module buffers, deferred initialisation."""
