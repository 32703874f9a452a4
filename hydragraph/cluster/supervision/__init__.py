"""Supervision of a run's processes: started, watched and replaced, on one machine or several."""
