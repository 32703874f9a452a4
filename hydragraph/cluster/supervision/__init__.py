"""Supervision of a run's processes, on one machine or several."""
