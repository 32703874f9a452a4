"""Estimates of a program's time, traffic and memory, and time breakdowns of real runs.

This package neither chooses strategies (`planner/`) nor needs a process group.
"""
