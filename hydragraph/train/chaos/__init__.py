"""Injection of faults into a run: processes are killed, stopped or slowed."""
