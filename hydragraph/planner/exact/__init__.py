"""The papers' integer programs, solved exactly for small cases with the extra `exact`, and exact dynamic programs.

They are an option (`method="exact"`) and the oracle of tests. Code that must be fast belongs elsewhere in `planner/`.
"""
