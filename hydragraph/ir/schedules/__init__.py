"""Pipeline schedules: the order in which a stage runs its forwards and backwards.

To add one, write a file like `gpipe.py`, and add it to SCHEDULES in `spec/strategy_text.py` and at the same place to
KINDS in `schedule_kinds.py`; add it to `planned_schedules` if plans should propose it.
"""
