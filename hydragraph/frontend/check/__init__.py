"""Numeric checks: compare a captured program, and a stage's graphs, with the unmodified model on short sequences.

They run before training. Problems that numbers cannot reveal are rejected by the frontend or a pass instead.
"""
