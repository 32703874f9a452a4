"""Failure detection: ranks notice that one failed, agree on which, and stop waiting for it. Start at `rank_watch`."""
