"""Fault injection: processes of a run are killed, stopped and slowed, and the run must continue as if undisturbed.

Only `hydragraph chaos`, tests and benchmarks use it.
"""
