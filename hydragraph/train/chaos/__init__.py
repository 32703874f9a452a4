"""Fault injection for `hydragraph chaos`, tests and benchmarks: processes of a run are killed, stopped and slowed."""
