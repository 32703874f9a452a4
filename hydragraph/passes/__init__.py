"""Pure functions from one form to the next: of graphs (annotate, shard, differentiate) and of instructions (place,
order, overlap, retain), and the compiled variants that they make.

This package does not trace users' models (`frontend/`), hold state or run instructions (`runtime/`).
"""
