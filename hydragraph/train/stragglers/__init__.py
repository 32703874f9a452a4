"""Handling of slow and lost devices during a run (Malleus, section 6).

monitor                  measured seconds of every rank -> what the cost model does not explain -> a rate per rank
rate_estimator           rates from noisy residuals, calibrated by the run itself
controller               rates -> another plan -> a switch where that pays
background_replanning    the plan, made in a separate process
run_events               one line for every event, with its reason

This package uses no process group and moves no state (`engine/`).
"""
