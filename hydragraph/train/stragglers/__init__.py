"""Handling of slow and lost devices during a run (Malleus, section 6).

Process groups and moves of state belong to `engine/`, not to this package.
"""
