"""Intermediate representation: the Program of a model, the RankProgram of a rank, layouts, links, and proofs about
them.

All of it is frozen data with a text form. A pass (`passes/`) builds or changes programs; `runtime/` runs them.
"""
