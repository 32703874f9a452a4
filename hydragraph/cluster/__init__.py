"""Processes that start, find, monitor and notify each other: launching ranks, communicators, collectives, agreement.

Nothing here knows what a rank computes. State and instructions belong in `runtime/`.
"""
