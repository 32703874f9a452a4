"""Checkpoints of a run, in one directory or in pieces, and pretrained models."""
