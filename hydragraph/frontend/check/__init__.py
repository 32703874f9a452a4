"""Numeric checks of a captured program, and of a stage's graphs, before training."""
