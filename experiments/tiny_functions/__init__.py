"""Work that is split into tiny functions where a reward is taken function by function."""
