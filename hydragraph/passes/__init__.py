"""Passes: pure functions on graphs (annotate, shard, differentiate) and on instructions (order, overlap, retain).

Tracing of users' models is in `frontend/`; state and execution are in `runtime/`.
"""
