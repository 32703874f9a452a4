"""The papers' integer programs, for small cases (the extra `exact`) and as the oracle of tests."""
