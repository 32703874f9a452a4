"""Which devices are slow or lost today, and what a run does about it while it goes on (Malleus, section 6).

monitor                  measured seconds of every rank -> what the cost model does not explain -> a rate per rank
rate_estimator           rates from noisy residuals, calibrated by the run itself
controller               rates -> another plan -> a switch where that pays
background_replanning    the plan, made in a process of its own
run_events               one line for everything that happened, with its reason

Nothing here uses a process group, or moves state (`engine/`).
"""
