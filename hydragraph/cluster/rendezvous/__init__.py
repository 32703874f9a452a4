"""Rendezvous of the ranks that remain after a failure, and of new ones that join, in rounds called generations.

protocol          decisions of a supervisor and answers of a member; pure
store_registers   the keys of a store that carry their messages
member            a rank's side: meet, build the process group, notice a call

Processes are started and replaced in `cluster/supervision/`.
"""
