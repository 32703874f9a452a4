"""Command line: one module per command of `cli.py`, and modules that commands share."""
