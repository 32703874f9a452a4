"""Strategies, clusters, homes, sequences and workloads, as frozen dataclasses with text or YAML."""
