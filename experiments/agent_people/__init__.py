"""An agent that learns from simulated people: the arithmetic of its cycle, and what came of one."""
