"""Plans for devices that differ: by type (AutoHet), by memory (Metis), or because some are slow today (Malleus).

prices.py      what a group of ranks takes for a layer and what it holds: numbers for the search, read from Costs
groups.py      nodes -> tensor-parallel groups, slow devices in small ones (Malleus, theorems 1 and 2)
layers.py      the layers of one pipeline over its stages (Malleus' layer ILP, AutoHet's equation 4), exactly
sharing.py     micro-batches over pipelines (Malleus' data ILP), exactly
pipelines.py   groups -> pipelines, improved by exchanges
settle.py      a candidate -> a strategy with its assignment, home, exact seconds and memory
shares.py      who owns how much of the state
bound.py       seconds that no plan beats
power.py       AutoHet's own formulation of grouping (equation 3), exactly, and by SCIP
planning.py    `plan`: candidates of a method, the best of them, and why the others lost
"""
