"""Time, traffic and memory of a program; profiles, the event simulation, and accounts of real runs.

This package does not choose strategies (`planner/`) or need a process group.
"""
