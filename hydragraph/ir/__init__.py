"""The Program of a model, the RankProgram of a rank, layouts, links between layouts, and proofs about them.

All of it is frozen data with a text form. What builds or changes a program is a pass (`passes/`); what runs one is in
`runtime/`.
"""
