"""The parts of the harness that run inside of sandboxes: standard library only."""
