"""User-facing values: strategies, clusters, homes, assignments, sequences and workloads, as frozen dataclasses with a
text or YAML form.

This package does not compute costs, make choices, or communicate with other processes.
"""
