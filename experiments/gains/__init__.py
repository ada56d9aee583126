"""Gains of a sweep's runs on held-out tasks, and how soon they came."""
