"""Recall over documents: a small model per attention method, and a curve of what each finds."""
