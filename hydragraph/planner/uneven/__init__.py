"""Plans for devices that differ: by type (AutoHet), by memory (Metis), or because some are slow today (Malleus).

prices.py      what a group of ranks takes for a layer and what it holds: numbers for the search, read from Costs
groups.py      nodes -> tensor-parallel groups, slow devices in small ones (Malleus, theorems 1 and 2)
layers.py      the layers of one pipeline over its stages (Malleus' layer ILP, AutoHet's equation 4), exactly
sharing.py     micro-batches over pipelines (Malleus' data ILP), exactly
pipelines.py   groups -> pipelines, improved by exchanges
searching.py   candidates of one way of searching: degrees, groups, numbers of pipelines, micro-batch sizes
pooled.py      a candidate's layers again, where stages and owners of the state share all memory, exactly
simple.py      equal pipelines in node order, which no plan may lose to
exchange.py    when an iteration ends, pull and push included, without a simulation
finalists.py   from many candidates to the few that are looked at exactly
ordering.py    ranks in an order of planning's own, and what is found in theirs
fewer.py       parts of a cluster, where messages take longer than computing
settle.py      a candidate -> a strategy with its assignment, home, exact seconds and memory
varying.py     what strategies take for lengths that vary, traffic included: an estimate of many, a few exactly
regrouping.py  better ones for them, by moves of devices between pipelines
shares.py      who owns how much of the state
bound.py       seconds that no plan beats
whole_bound.py seconds that no pipelines of whole layers and whole sequences beat: nearer, and found in minutes
power.py       AutoHet's own formulation of grouping (equation 3), exactly, and by SCIP
lacking.py     where nothing fits: how much is lacking, and what would help
explaining.py  a plan in words
planning.py    `plan`: candidates of a method, the best of them, and why the others lost
"""
