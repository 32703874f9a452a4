"""A training run: config, folder, loop, metrics, slow ranks and injected faults."""
