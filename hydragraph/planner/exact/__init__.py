"""The papers' integer programs, solved exactly for small cases with the extra `exact`, and dynamic programs that are as
exact.

They are an option (`method="exact"`) and the oracle of tests. What must answer quickly belongs elsewhere in `planner/`.
"""
