"""Integer programs of Hydraulis and AutoHet, for small problems and for tests."""
