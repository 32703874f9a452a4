"""Fault injection for `hydragraph chaos`, tests and benchmarks, which kill, stop and slow processes of a run."""
