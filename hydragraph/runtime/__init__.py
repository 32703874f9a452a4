"""One rank, executing: prepared programs, the executor, streams and buffers, home state, links, and what is measured.

Processes belong in `cluster/`, files in `checkpoint/`, and what all ranks decide together in `engine/`.
"""
