"""Frontend: captures a model as a Program, or reads a Program from a compiled folder."""
