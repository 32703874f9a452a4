"""Passes: pure functions on graphs (annotate, shard, differentiate) and on instructions (order, overlap, retain).

The package also has `place` and the compiled variants. It does not trace users' models (`frontend/`), hold state or run
instructions (`runtime/`).
"""
