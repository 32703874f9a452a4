"""Processes that start, find, monitor and notify each other."""
