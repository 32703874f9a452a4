"""Metis's planner for devices of several types, the memory-aware one, and the exact optimum of what both search.

A plan divides all devices, types one after the other, into stages of consecutive ranks; each stage has its own degrees
of data and tensor parallelism and its own layers. Papers: Metis (USENIX ATC 2024) and Improved Intra-Operator
Parallelism for Distributed LLM Training, whose Table 1 `benchmarks/plans.py --only metis` prints beside these.
"""

from hydragraph.planner.metis.cluster import Cluster as Cluster
from hydragraph.planner.metis.cluster import DeviceType as DeviceType
from hydragraph.planner.metis.pricing import cost as cost
from hydragraph.planner.metis.pricing import parts as parts
from hydragraph.planner.metis.problem import Plan as Plan
from hydragraph.planner.metis.problem import Problem as Problem
from hydragraph.planner.metis.profile import Measurement as Measurement
from hydragraph.planner.metis.profile import Profile as Profile
from hydragraph.planner.metis.searching import Found as Found
from hydragraph.planner.metis.searching import Order as Order
from hydragraph.planner.metis.searching import search as search
