"""What users write: strategies, clusters, homes, sequences and workloads, as frozen dataclasses with text or YAML."""
