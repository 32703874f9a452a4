"""What a program takes and holds: seconds, bytes sent, memory; profiles, the event simulation, and accounts of real
runs.

Nothing here chooses a strategy (`planner/`) or needs a process group.
"""
