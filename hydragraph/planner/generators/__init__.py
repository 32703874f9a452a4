"""Candidate strategies, one method a file: groups of devices, pipelines, layers and memory of each.

A candidate's exact price is in `planner/price_candidate.py`. The search over candidates is in `planner/plan.py`.
"""
