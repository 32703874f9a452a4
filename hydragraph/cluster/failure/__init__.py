"""Failure detection: ranks notice that one of them failed, agree on which one and where, and stop waiting for it. Start
reading at `rank_watch`.

Processes are restarted in `cluster/supervision/`, and state is recovered in `engine/recovery.py`.
"""
