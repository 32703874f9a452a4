"""Checkpoints of a run, in one directory or as pieces in several places, and pretrained models (`weights/`)."""
