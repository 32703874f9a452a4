"""Pipeline schedules: the order in which a stage runs its forwards and backwards.

Costs of an order belong in `cost/`, and its instructions in `passes/order.py`.
"""
