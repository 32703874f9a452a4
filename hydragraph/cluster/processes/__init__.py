"""How processes start, end and share memory on one machine: forking, torchrun, pickling, signals, stores, threads.

Who is a rank is decided in `cluster/rendezvous/`, and who has failed in `cluster/failure/`.
"""
