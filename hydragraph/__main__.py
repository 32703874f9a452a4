"""`python -m hydragraph` is the command line, where its script is not on the path."""

from hydragraph.cli import main

main()
