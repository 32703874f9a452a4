"""Starting and ending of processes, and shared memory, on one machine.

`cluster/rendezvous/` decides which processes are ranks, and `cluster/failure/` which have failed.
"""
