"""Checkpoints of a run, whole or in pieces; `weights/` reads and writes pretrained models."""
