"""Pipeline schedules: the order in which a stage runs its forwards and backwards.

To add one:

1. Write a file like `gpipe.py`: a NAME, and a function that returns the `Schedule` of a `Shape`.
2. Add the name to SCHEDULES in `spec/strategy_text.py`, and the function at the same place of KINDS in
   `schedule_kinds.py`. Strategies can now name it; `tests/ir/schedules/test_schedule_kinds.py` checks it.
3. Add the name to `planned_schedules` in `spec/strategy_text.py` if plans should propose it.

Costs of an order belong in `cost/`, and its instructions in `passes/order.py`.
"""
