"""Intermediate representation: Program, RankProgram, layouts, links between layouts, and proofs about them."""
