"""Integer programs of the papers, for small problems and as a reference in tests."""
