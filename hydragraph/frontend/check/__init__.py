"""Numeric checks, before training: compare a captured program, and a stage's graphs, with the unmodified model.

Problems that numbers cannot reveal are rejected by the frontend or a pass instead.
"""
