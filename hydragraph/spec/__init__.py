"""What users write and read: strategies, clusters, homes, assignments, sequences and workloads, as frozen dataclasses
with a text or YAML form.

Nothing here computes a cost, chooses anything, or talks to other processes.
"""
