"""Starting and ending processes, and sharing memory, on one machine: forking, torchrun, pickling, signals, stores,
threads.

`cluster/rendezvous/` decides which processes are ranks, and `cluster/failure/` which have failed.
"""
