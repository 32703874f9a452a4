"""The papers' integer programs, for small cases and as the oracle of tests."""
