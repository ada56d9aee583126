"""Tab jumps: where the next edit is, learned on simulated programmers who edit several files."""
