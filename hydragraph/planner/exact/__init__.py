"""The papers' integer programs, for small problems and as a reference in tests."""
