"""Checkpoints of a run, in one directory or in pieces in several places; `weights/`: pretrained models."""
