"""Changes to the module before it is sharded."""
