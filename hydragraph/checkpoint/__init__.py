"""State in and out: checkpoints of a run, their pieces in memory, on disk and in a store, and (`weights/`) pretrained
files.

When a run saves, and what it prunes, is decided in `train/`.
"""
