"""Pipeline schedules: the order in which a stage runs its forwards and backwards.

To add a schedule, write a file like the existing ones. Add its name to SCHEDULES in `spec/schedule_names.py`, its
function to KINDS in `schedule_kinds.py`, in the same order, and, if plans should propose it, to `planned_schedules`.
"""
