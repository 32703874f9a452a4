"""Start, watch and replace a run's processes, on one machine or several."""
