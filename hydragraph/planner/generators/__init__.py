"""Generators of candidate strategies, one method per file."""
