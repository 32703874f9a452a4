"""Candidate strategies, one method per file."""
