"""Supervision of a run's processes on all machines."""
