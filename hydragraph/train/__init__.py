"""A training run: config, folder, loop, metrics, slow ranks (`stragglers/`) and injected faults (`chaos/`)."""
