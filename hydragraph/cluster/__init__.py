"""Processes that start, find, monitor and notify each other: launch, communicators, collectives, agreement.

This package does not depend on what a rank computes. State and instructions belong in `runtime/`.
"""
