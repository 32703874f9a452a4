"""Handling of slow and lost devices during a run (Malleus, section 6).

monitor                  measured seconds of every rank -> what the cost model does not explain -> a rate per rank
controller               rates -> another plan -> a switch where that pays
background_replanning    the plan, made in a separate process
reshard_policy           rates -> another home of the state, where that pays

This package uses no process group and moves no state (`engine/`).
"""
