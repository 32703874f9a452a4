"""Failure detection: ranks notice that one failed, agree on which and where, and stop waiting for it. Start at
`rank_watch`.

Processes are restarted in `cluster/supervision/`, and state is recovered in `engine/recovery.py`.
"""
