"""Which devices are slow or lost today, and what a run does about it while it goes on (Malleus, section 6).

monitor       measured seconds of every rank -> what the cost model cannot explain -> a rate per rank
estimate      rates from noisy residuals: calibrated by the run itself, found in few iterations, and let go of again
controller    rates -> another plan, made in a process of its own -> switched to where that pays
events        one line for everything that happened, with its reason
"""
