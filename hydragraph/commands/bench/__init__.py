"""Measurements of `hydragraph bench`, and their tables."""
