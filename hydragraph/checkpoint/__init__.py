"""Checkpoints of a run, their pieces in memory, on disk and in a store, and (`weights/`) pretrained files."""
