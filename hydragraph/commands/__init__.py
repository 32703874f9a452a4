"""One module per verb of the command line, and what verbs share. Only these print.

Computation belongs in the folders that a verb calls. Verbs are listed in `cli.py`.
"""
