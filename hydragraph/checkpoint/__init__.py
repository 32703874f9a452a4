"""Checkpoints of a run, whole and in pieces, and (`weights/`) pretrained files."""
