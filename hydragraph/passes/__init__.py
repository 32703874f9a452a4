"""Passes: pure functions on graphs (annotate, shard, differentiate) and on instructions (order, overlap, retain)."""
