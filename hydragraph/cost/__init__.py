"""Time, traffic and memory of a program: profiles, the event simulation, and accounts of real runs.

This package neither chooses strategies (`planner/`) nor needs a process group.
"""
