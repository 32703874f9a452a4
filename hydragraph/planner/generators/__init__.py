"""Candidate strategies, one method per file: groups of devices, pipelines, and the layers and memory of each.

A candidate's exact price is in `planner/price_candidate.py`. The search over candidates is in `planner/plan.py`.
"""
