"""How ranks notice that one of them failed, agree on which one and where, and stop waiting for it; begin in
`rank_watch`.

Nothing here restarts a process (`cluster/supervision/`) or recovers state (`engine/recovery.py`).
"""
