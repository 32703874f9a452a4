"""Pure functions from one form to the next: of graphs (annotate, shard, differentiate) and of instructions (place,
order, overlap, retain), and the compiled variants that they make.

Nothing here traces a user's model (`frontend/`), holds state or runs instructions (`runtime/`).
"""
