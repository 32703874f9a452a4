"""Handling of slow and lost devices during a run (Malleus, section 6).

`engine/` implements process groups and moves of state.
"""
