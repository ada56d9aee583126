"""The command that says how many answers and users an agent's cycle needs."""
