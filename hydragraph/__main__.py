"""Entry point of `python -m hydragraph`, for when the `hydragraph` script is not on the PATH."""

from hydragraph.cli import main

main()
