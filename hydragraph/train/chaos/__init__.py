"""Fault injection, which kills, stops and slows processes of a run, for `hydragraph chaos`, tests and benchmarks."""
