"""The comparison by numbers: a captured program, and the graphs of a stage, beside the unmodified model on short
sequences.

It runs before anything is trained. What cannot be seen in numbers is refused by the frontend or a pass instead.
"""
