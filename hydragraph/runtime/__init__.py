"""Execution on one rank: prepared programs, the executor, streams and buffers, home state, links, and measurements."""
