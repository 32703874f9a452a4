"""Processes of a run seen from outside: started, watched, and replaced, on one machine or several.

supervisor    one machine
coordinator   several machines: the leader, and its links to the others
node_agent    the supervisor of a machine that does not lead

What the ranks say to each other is in `cluster/rendezvous/`.
"""
