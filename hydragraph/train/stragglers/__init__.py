"""Handling of slow and lost devices during a run (Malleus, section 6).

This package uses no process group and moves no state (`engine/`).
"""
