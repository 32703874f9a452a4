"""Processes and shared memory of one machine."""
