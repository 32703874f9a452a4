"""Candidate strategies, one method per file: groups of devices, pipelines, and the layers and memory of each."""
