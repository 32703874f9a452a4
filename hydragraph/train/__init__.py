"""A training run: its config, folder, loop and metrics; slow ranks (`stragglers/`) and injected faults (`chaos/`)."""
