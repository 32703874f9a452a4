"""Frontend: a model becomes a Program, or a Program is read from a compiled folder."""
