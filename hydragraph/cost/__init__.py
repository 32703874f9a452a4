"""Estimates of a program's time, traffic and memory, and time breakdowns of real runs, without a process group."""
