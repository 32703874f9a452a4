"""Failure detection: ranks agree on which rank failed, and stop waiting for it. Read `rank_watch` first."""
