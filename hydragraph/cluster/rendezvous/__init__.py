"""How ranks that are left after a failure meet again, and how others join them: rounds, called generations.

protocol          what a supervisor decides and what a member answers; pure
store_registers   the keys of a store through which they speak
member            a rank's side: meet, build the process group, notice a call

Processes are started and replaced in `cluster/supervision/`.
"""
