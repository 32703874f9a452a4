"""Supervision of a run's processes from outside: started, watched, and replaced, on one machine or several.

supervisor    one machine
coordinator   several machines: the leader, and its links to the others
node_agent    the supervisor of a machine that does not lead
election      the leader is elected in a register (etcd): `leadership` decides, `etcd_register` stores

The protocol between the ranks is in `cluster/rendezvous/`.
"""
