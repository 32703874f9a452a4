"""Failure detection: ranks agree on which rank failed, and stop waiting for it. Start at `rank_watch`."""
