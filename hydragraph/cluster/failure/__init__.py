"""Failure detection: ranks agree on which rank failed. Read `rank_watch` first."""
