"""Conversion of a model, or of a compiled folder, to a Program."""
