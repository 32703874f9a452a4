"""Pipeline schedules: the order in which a stage runs its forwards and backwards.

To add a schedule, write a file like the existing ones. Then add its name to SCHEDULES in `spec/schedule_names.py` and
its function to KINDS in `schedule_kinds.py`, in the same order. If plans should propose it, also add it to
`planned_schedules`.
"""
