"""Intermediate representation: Program, RankProgram, layouts, links between layouts, and proofs about them.

All of it is frozen data with a text form. A pass (`passes/`) builds or changes programs; `runtime/` runs them.
"""
