"""Command line as `python -m hydragraph`, for when the `hydragraph` script is not on the path."""

from hydragraph.cli import main

main()
