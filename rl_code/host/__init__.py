"""The machine that a process runs on: files that are written whole, locks, and requests to
stop."""
