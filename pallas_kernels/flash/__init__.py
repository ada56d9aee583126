"""Dense attention over packed rows with trees of prefixes and documents, forward and backward."""
