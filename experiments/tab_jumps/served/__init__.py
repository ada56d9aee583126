"""Checkpoints of the cycle of Tab jumps beside a copy that never changes."""
