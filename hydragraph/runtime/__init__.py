"""Execution on one rank: programs, streams and buffers, home state, links, and measurements."""
