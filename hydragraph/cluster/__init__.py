"""Processes that start, find, monitor and notify each other, for any kind of work."""
