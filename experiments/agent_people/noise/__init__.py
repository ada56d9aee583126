"""The command that measures the noise of the gradient of an agent's cycle."""
