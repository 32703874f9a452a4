"""Faults on purpose: processes killed, stopped and slowed at random moments of a run, which must go on as if
undisturbed.

Only `hydragraph chaos`, tests and benchmarks use it.
"""
