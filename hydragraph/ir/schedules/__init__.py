"""Pipeline schedules: the order in which a stage runs its forwards and backwards.

The cost of an order is computed in `cost/`, and its instructions are made in `passes/order.py`.
"""
