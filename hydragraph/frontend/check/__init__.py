"""Numeric checks of a program and of a stage's graphs."""
