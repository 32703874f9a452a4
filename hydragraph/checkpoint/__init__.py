"""Checkpoints of a run, their pieces in memory, on disk and in a store, and (`weights/`) pretrained files.

`train/` decides when a run saves and what it prunes.
"""
