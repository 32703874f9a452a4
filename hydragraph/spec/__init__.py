"""Frozen dataclasses of strategies, clusters, homes, sequences and workloads, and their text and YAML formats."""
