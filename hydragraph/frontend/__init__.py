"""A model becomes a Program: captured without changes to it, compared with it by numbers (`check/`), or read from a
compiled folder (`compiled_folder/`); and sequences become packed mini-batches.

What a trace would lose is refused here by name. Transformations of captured graphs belong in `passes/`.
"""
