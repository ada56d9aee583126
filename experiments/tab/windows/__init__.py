"""The command that compares windows of old data."""
