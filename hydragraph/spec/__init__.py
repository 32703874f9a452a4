"""Frozen dataclasses of strategies, clusters, homes and workloads, and their text and YAML formats."""
