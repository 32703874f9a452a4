"""Metis's planner, its memory-aware variant, and the exact optimum of their search space.

A plan divides all devices into stages of consecutive ranks. Papers: Metis (USENIX ATC 2024) and Improved Intra-Operator
Parallelism for Distributed LLM Training (Table 1: `benchmarks/plans.py --only metis`).
"""

from hydragraph import attributes

# Imported on first use, to avoid circular imports.
__all__, __getattr__, __dir__ = attributes(
    "hydragraph.planner.metis",
    {
        "Cluster": "hydragraph.planner.metis.cluster",
        "DeviceType": "hydragraph.planner.metis.cluster",
        "Found": "hydragraph.planner.metis.metis_search",
        "Measurement": "hydragraph.planner.metis.profile",
        "Order": "hydragraph.planner.metis.metis_search",
        "Plan": "hydragraph.planner.metis.problem",
        "Problem": "hydragraph.planner.metis.problem",
        "Profile": "hydragraph.planner.metis.profile",
        "cost": "hydragraph.planner.metis.metis_cost",
        "parts": "hydragraph.planner.metis.metis_cost",
        "search": "hydragraph.planner.metis.metis_search",
    },
)
