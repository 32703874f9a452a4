"""Intermediate representation: Program, RankProgram, layouts, links, and proofs about them."""
