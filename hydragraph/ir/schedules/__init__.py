"""Pipeline schedules: in which order a stage runs its forwards and backwards.

What an order costs is in `cost/`, and the instructions made from it are in `passes/order.py`.
"""
