"""Failure detection: ranks agree on which one failed, and stop waiting for it. Start at `rank_watch`."""
