"""The command that measures the noise of a batch's gradient."""
