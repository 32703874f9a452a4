"""Passes: pure functions on graphs and on instructions."""
