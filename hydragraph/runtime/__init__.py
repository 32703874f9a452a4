"""Execution on one rank: prepared programs, the executor, streams and buffers, home state, links, and measurements.

Processes belong in `cluster/`, files in `checkpoint/`, and decisions of all ranks together in `engine/`.
"""
