"""Supervision of a run's processes from outside: started, watched, and replaced, on one machine or several."""
