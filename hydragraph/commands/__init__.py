"""One module per verb of the command line, and what verbs share. Only these print, or look at how the process was
started.

What a verb computes belongs in the folder that it calls. Verbs are listed in `cli.py`.
"""
